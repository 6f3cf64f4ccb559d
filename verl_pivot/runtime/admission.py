"""The waiting line before the engines of one inference role.

Engines belong to slots that come and go. A request gets the admitted engine with the fewest requests while that has
room in its decode batch; else it waits here, where a slot that arrives later finds it, instead of inside an engine
that it would have to be fetched out of again. Lives in the control-plane process, in one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from verl_pivot.core.sequences import SequenceState

PREFERENCE = 4
"""Requests, or a quarter, that the preferred engine may have more than the emptiest one."""


class AdmissionQueue:
    """Implements ``runtime.ports.AdmissionPort``; the rollout balancer and the judge router put their protocol on it.

    First come, first served, except that requests which go ``ahead`` (a sequence that was cut off by a shift, a later
    turn) come before those that have not begun: a straggler must not queue behind a batch.
    """

    def __init__(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._inflight: dict[str, int] = {}
        self._admitted: set[int] = set()
        self._open: list[str] = []
        self._line: deque[asyncio.Future[str]] = deque()
        self._ahead: deque[asyncio.Future[str]] = deque()
        self._sequences: dict[asyncio.Future[str], SequenceState] = {}
        """Of those that wait."""
        self.on_demand: Callable[[], object] | None = None
        """Called when a request has to wait; the controller plans at once."""

    # ---- registration -------------------------------------------------------------------------------------------

    def register(self, engine_id: str, slot_id: int, limit: int) -> None:
        """Make an engine known. It gets at most ``limit`` requests at a time once its slot is admitted."""
        if limit < 1:
            raise ValueError(f"engine {engine_id} of slot {slot_id}: it must take at least 1 request, not {limit}")
        self._slot_of[engine_id], self._limits[engine_id] = slot_id, limit
        self._inflight.setdefault(engine_id, 0)
        self._refresh()

    def forget(self, engine_id: str) -> None:
        """An engine that is gone for good, with what it was given."""
        for known in (self._slot_of, self._limits, self._inflight):
            known.pop(engine_id, None)
        self._refresh()

    # ---- AdmissionPort ------------------------------------------------------------------------------------------

    def mask(self, slot_id: int) -> None:
        self._admitted.discard(slot_id)
        self._refresh()

    def admit(self, slot_id: int) -> None:
        self._admitted.add(slot_id)
        self._refresh()

    def queued(self) -> int:
        return sum(not waiter.done() for line in (self._ahead, self._line) for waiter in line)

    def queued_sequences(self) -> list[SequenceState]:
        return [sequence for waiter, sequence in self._sequences.items() if not waiter.done()]

    def inflight(self) -> Mapping[int, int]:
        counts: dict[int, int] = {}
        for engine_id, count in self._inflight.items():
            slot_id = self._slot_of[engine_id]
            counts[slot_id] = counts.get(slot_id, 0) + count
        return counts

    # ---- requests -----------------------------------------------------------------------------------------------

    async def acquire(
        self, preferred: str | None = None, ahead: bool = False, sequence: SequenceState | None = None
    ) -> str:
        """An engine for one request, counted as in flight until ``release``. May be cancelled while it waits.

        Args:
            preferred: engine to use (it holds this session's prefix) if it is admitted, has room, and has not much more
                to do than the emptiest.
            ahead: wait before those that have not begun.
            sequence: which sequence the request is for, where its client says so.
        """
        engine_id = self._choose(preferred)
        if engine_id is not None:
            self._inflight[engine_id] += 1
            return engine_id
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        line = self._ahead if ahead else self._line
        line.append(waiter)
        if sequence is not None:
            self._sequences[waiter] = sequence
        if self.on_demand is not None:
            self.on_demand()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(waiter.result())
            elif waiter in line:
                line.remove(waiter)
            raise
        finally:
            self._sequences.pop(waiter, None)

    def release(self, engine_id: str) -> None:
        """The request was answered, or was lost with its engine."""
        if self._inflight.get(engine_id, 0) > 0:
            self._inflight[engine_id] -= 1
            self._hand_out()

    def slot_of(self, engine_id: str) -> int | None:
        """Slot of a registered engine; None for one that is not known, or not any more."""
        return self._slot_of.get(engine_id)

    def is_open(self, engine_id: str) -> bool:
        """Whether the engine's slot is admitted."""
        return engine_id in self._open

    def open_engines(self) -> dict[str, int]:
        """Engines of admitted slots, with their requests in flight."""
        return {engine_id: self._inflight[engine_id] for engine_id in self._open}

    def _choose(self, preferred: str | None = None) -> str | None:
        best = min(self._open, key=self._inflight.__getitem__, default=None)
        if best is not None and preferred in self._open and self._has_room(preferred):
            least = self._inflight[best]
            if self._inflight[preferred] <= least + max(PREFERENCE, least // 4):
                return preferred
        if best is not None and self._has_room(best):
            return best
        # Limits may differ between engines: the emptiest one may be full while another is not.
        return next((engine_id for engine_id in self._open if self._has_room(engine_id)), None)

    def _has_room(self, engine_id: str) -> bool:
        return self._inflight[engine_id] < self._limits[engine_id]

    def _hand_out(self) -> None:
        """Give engines with room to those who wait."""
        for line in (self._ahead, self._line):
            while line:
                if line[0].done():
                    line.popleft()
                    continue
                engine_id = self._choose()
                if engine_id is None:
                    return
                self._inflight[engine_id] += 1
                line.popleft().set_result(engine_id)

    def _refresh(self) -> None:
        self._open = [engine_id for engine_id, slot_id in self._slot_of.items() if slot_id in self._admitted]
        self._hand_out()
