"""Name and place of the shared-memory checkpoint engine, without the cost of importing it."""

from __future__ import annotations

from pathlib import Path

NAME = "bench_shm"


def directory(run: Path) -> Path:
    """Folder in shared memory for the weights of one run."""
    return Path("/dev/shm") / f"verl_pivot_bench_{run.name}"
