"""Tells the benchmark which GPU this process was given; imported in verl's workers through ``model.external_lib``.

Ray sets the visible devices inside a running worker, where ``/proc/<pid>/environ`` does not show them.
"""

from __future__ import annotations

import os
from pathlib import Path

RUN_DIRECTORY = "VERL_PIVOT_BENCH_RUN"
"""Environment variable that names the run's directory, and by which the benchmark knows the run's processes."""
FOLDER = "announced"


def announce() -> None:
    """Write the visible devices to ``<run directory>/announced/<pid>``."""
    folder = Path(os.environ[RUN_DIRECTORY]) / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))


if RUN_DIRECTORY in os.environ:
    announce()
