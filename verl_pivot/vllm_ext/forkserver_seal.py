"""The last module a fork server preloads: what it looks like at the moment engines start to be forked from it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

_SAFE_TO_FORK = {"jemalloc_bg_thd"}
"""pyarrow's allocator (imported by way of pandas) has fork handlers that reset its thread in the child."""


def _other_threads() -> tuple[str, ...]:
    tasks = Path("/proc/self/task")
    names = [(tasks / task / "comm").read_text().strip() for task in os.listdir(tasks) if int(task) != os.getpid()]
    return tuple(sorted(name for name in names if name not in _SAFE_TO_FORK))


# Objects that a collection never visits are never written to: their pages stay shared with the children.
gc.collect()
gc.freeze()

SERVER_PID = os.getpid()
OTHER_THREADS = _other_threads()
"""Kernel names of threads that preloading left behind. fork copies only the calling one, and what another held locked
at that moment stays locked in the child for ever."""
