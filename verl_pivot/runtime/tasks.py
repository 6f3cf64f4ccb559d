"""Background tasks with an owner: none is forgotten, none fails unseen, none outlives ``cancel_all``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any


class TaskSet:
    """Tasks of one owner. ``on_error`` gets the exception of a task that failed (cancelled ones did not fail)."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def settle(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Wait until all ``tasks`` ended, however. Being cancelled here leaves them running."""
        if tasks:
            await asyncio.wait(tasks)

    async def cancel_all(self) -> None:
        """Cancel every task, again if need be, and return when none is left."""
        while self._tasks:
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._tasks -= tasks

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
