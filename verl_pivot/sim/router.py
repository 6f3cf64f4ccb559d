"""Who gives requests to engines: one waiting line for each inference role, as in the runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from verl_pivot.core.evening import Sequences
from verl_pivot.sim.engine import SimEngine, SimSequence


def running_like(engines: Collection[SimEngine], prefill_s_per_token: float) -> Sequences:
    """What one sequence that runs in ``engines`` is like, on average."""
    running = max(1, sum(engine.running for engine in engines))
    context = sum(engine.context_tokens for engine in engines) / running
    prompts = sum(engine.prompt_tokens for engine in engines) / running
    return Sequences(context, max(1.0, context - prompts), context * prefill_s_per_token)


class SimRouter:
    """First come, first served; what was cut off by a shift goes ahead of what has not begun.

    An engine gets a sequence when it would run at once; the emptiest one first. ``clock`` gives the present time,
    ``prepare`` brings a slot's engine up to it, and ``on_submit`` is told which slot got something.
    """

    def __init__(
        self, clock: Callable[[], float], prepare: Callable[[int], None], on_submit: Callable[[int], None]
    ) -> None:
        self._clock = clock
        self._prepare = prepare
        self._on_submit = on_submit
        self._ahead: deque[SimSequence] = deque()
        self._line: deque[SimSequence] = deque()
        self._engines: dict[int, SimEngine] = {}

    @property
    def queued(self) -> int:
        return len(self._ahead) + len(self._line)

    @property
    def inflight(self) -> int:
        return sum(engine.sequences for engine in self._engines.values())

    @property
    def engines(self) -> dict[int, SimEngine]:
        """Admitted engines by slot."""
        return self._engines

    def waiting(self) -> Iterable[SimSequence]:
        yield from self._ahead
        yield from self._line

    def admit(self, slot_id: int, engine: SimEngine) -> None:
        """From now on it takes part when requests are handed out, which the caller sees to."""
        self._engines[slot_id] = engine

    def mask(self, slot_id: int) -> None:
        self._engines.pop(slot_id, None)

    def submit(self, sequences: Iterable[SimSequence]) -> None:
        self._line.extend(sequences)
        self.hand_out()

    def resubmit(self, sequences: Iterable[SimSequence]) -> None:
        """Sequences that an engine gave up."""
        given_up = list(sequences)
        self._ahead.extend(sequence for sequence in given_up if sequence.started)
        self._line.extendleft(sequence for sequence in reversed(given_up) if not sequence.started)
        self.hand_out()

    def hand_out(self) -> None:
        """Give engines with room to those who wait."""
        if not self.queued or not self._engines:
            return
        now_s = self._clock()
        touched = set()
        room = {slot_id: engine.sequences for slot_id, engine in self._engines.items() if engine.has_room()}
        while room and self.queued:
            slot_id = min(room, key=room.__getitem__)
            engine = self._engines[slot_id]
            if slot_id not in touched:
                self._prepare(slot_id)
            sequence = self._ahead.popleft() if self._ahead else self._line.popleft()
            engine.submit(sequence, now_s)
            touched.add(slot_id)
            if engine.has_room():
                room[slot_id] += 1
            else:
                del room[slot_id]
        for slot_id in touched:
            self._on_submit(slot_id)
