"""Ending an engine's processes with all that they started: a worker for each GPU holds the weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import psutil

KILL_WAIT_S = 10.0


def family_of(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and their descendants, as far as they run. The objects know a process from a later one that
    got the same number."""
    family: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            family += [*process.children(recursive=True), process]
    return family


async def end(family: Iterable[psutil.Process]) -> None:
    """Kill them and return when they are gone. Raises RuntimeError when one stays."""
    family = list(family)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until_s = time.monotonic() + KILL_WAIT_S
    while left := [process.pid for process in family if not _is_gone(process)]:
        if time.monotonic() > until_s:
            raise RuntimeError(f"processes {left} did not end within {KILL_WAIT_S:g} s of being killed")
        await asyncio.sleep(0.02)


def _is_gone(process: psutil.Process) -> bool:
    try:
        # A zombie's parent has yet to hear of it, but its memory is free.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
