"""The trainer's lease: the right to use every train slot at once.

Asked for and returned by the trainer through the controller; granted when the last slot of the train unit is free.
It moves no slot itself: while it is ``wanted`` the planner shifts slots to train, and the controller calls ``poke``
whenever a slot changed. All calls come from the control plane's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from verl_pivot.core.snapshot import LeaseState
from verl_pivot.runtime.ports import EventSink


class LeaseTimeout(RuntimeError):
    """The train slots were not free in time; the message names those that were not, and why."""


class Lease:
    """First come, first served; one holder at a time.

    ``blocked_by`` describes what training would have to wait for (empty: nothing). ``on_change`` is called, without
    arguments, after each change of ``state``.
    """

    def __init__(
        self,
        blocked_by: Callable[[], Sequence[str]],
        events: EventSink,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocked_by = blocked_by
        self._events = events
        self._on_change = on_change
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_held = False
        self._closed: BaseException | None = None
        self._state = LeaseState.FREE
        self._change = asyncio.Event()

    @property
    def state(self) -> LeaseState:
        if self._is_held:
            return LeaseState.HELD
        return LeaseState.WANTED if self._waiters else LeaseState.FREE

    async def acquire(self, deadline_s: float) -> None:
        """Wait for the lease. Raises LeaseTimeout after ``deadline_s``; a cancelled or late call leaves no claim."""
        if self._closed is not None:
            raise self._closed
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.poke()
        self._report()
        try:
            await asyncio.wait({waiter}, timeout=deadline_s)
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        if not waiter.done():
            blocked = "; ".join(self._blocked_by()) or "another holder has not returned it"
            self._withdraw(waiter)
            raise LeaseTimeout(
                f"the train slots were not free within {deadline_s:g} s "
                f"(trainer.resource_shift.train.lease_deadline_s): {blocked}"
            )
        waiter.result()

    def release(self) -> None:
        """Return the lease; the next in line gets it at once when the slots are still free."""
        if not self._is_held:
            raise RuntimeError(f"the lease was released but is not held (it is {self.state})")
        self._is_held = False
        self.poke()
        self._report()

    def poke(self) -> None:
        """Grant the lease if someone waits and nothing is in the way."""
        if self._is_held or not self._waiters or self._blocked_by():
            return
        self._is_held = True
        self._waiters.popleft().set_result(None)
        self._report()

    async def changed(self) -> None:
        """Return after the next change of ``state``."""
        await self._change.wait()

    def close(self, error: BaseException) -> None:
        """Every waiter, present and future, gets ``error``."""
        self._closed = error
        while self._waiters:
            self._waiters.popleft().set_exception(error)

    def _withdraw(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            self._waiters.remove(waiter)
            self._report()
        elif waiter.exception() is None:
            self.release()  # granted in the very moment its owner was cancelled

    def _report(self) -> None:
        if self.state is not self._state:
            self._state = self.state
            self._events.emit("lease", state=str(self._state))
            self._change.set()
            self._change = asyncio.Event()
            self._on_change()
