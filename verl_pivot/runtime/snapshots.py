"""What the controller sees: loads that engines report, decode costs learned from them, and the frozen snapshot."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_pivot.core.costs import DecodeCost, DecodeCostFitter
from verl_pivot.core.sequences import SequenceReport
from verl_pivot.core.snapshot import INFERENCE_ROLES, ReplicaLoad, Role, RoleDemand, SlotStatus, SlotView
from verl_pivot.runtime.ports import AdmissionPort, Clock, EngineDead, EngineError, EnginePort
from verl_pivot.runtime.slots import EngineState, Slot, SlotTable
from verl_pivot.runtime.steps import within

FIRST_TOKENS = 256
"""Reports of times to the first token that are remembered of each role."""
UNDELAYED = 0.1
"""Share of them in which a request waited for nothing but its own prefill."""


@dataclass(frozen=True)
class LostEngine:
    """An engine that was serving and does not any more."""

    slot: Slot
    role: Role
    error: str
    is_dead: bool
    """Its process is gone; else it is there but silent."""


class LoadMonitor:
    """Asks awake engines for their load, all at once, and learns each role's decode cost from the answers.

    ``timeout_s`` bounds one question; an engine that leaves all questions of ``silence_s`` unanswered counts as lost.
    ``hides_dead``: dead engines are not offered to the planner, because nothing will restart them.
    """

    def __init__(
        self,
        table: SlotTable,
        engines: Mapping[tuple[int, Role], EnginePort],
        clock: Clock,
        *,
        timeout_s: float,
        silence_s: float,
        hides_dead: bool,
    ) -> None:
        self._table = table
        self._engines = engines
        self._clock = clock
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._hides_dead = hides_dead
        self._loads: dict[int, tuple[int, ReplicaLoad]] = {}
        self._first_tokens_s: list[float] = []
        self._first_token_s = {role: deque[float](maxlen=FIRST_TOKENS) for role in INFERENCE_ROLES}
        self._heard: dict[int, tuple[int, float]] = {}
        self._fitters = {role: DecodeCostFitter() for role in INFERENCE_ROLES}

    async def collect(self) -> list[LostEngine]:
        """One round over all serving engines; returns those found lost."""
        serving = [slot for role in INFERENCE_ROLES for slot in self._table.serving(role)]
        answers = await asyncio.gather(*(self.ask(slot) for slot in serving))
        return [lost for lost in answers if lost is not None]

    async def ask(self, slot: Slot) -> LostEngine | None:
        """Ask one serving engine. An answer that comes after the slot moved on is dropped."""
        role, epoch = slot.role, slot.epoch
        heard_epoch, heard_s = self._heard.get(slot.slot_id, (-1, 0.0))
        if heard_epoch != epoch:
            heard_s = self._clock.now_s()
            self._heard[slot.slot_id] = (epoch, heard_s)
        what = f"slot {slot.slot_id} {role}: load report"
        try:
            load = await within(self._timeout_s, what, None, self._engines[slot.slot_id, role].stats())
        except EngineDead as error:
            return LostEngine(slot, role, str(error), True) if slot.epoch == epoch else None
        except EngineError as error:
            silent_s = self._clock.now_s() - heard_s
            if slot.epoch != epoch or silent_s < self._silence_s:
                return None
            return LostEngine(slot, role, f"no load report for {silent_s:.1f} s; last: {error}", False)
        if slot.epoch == epoch:
            now_s = self._clock.now_s()
            self._heard[slot.slot_id] = (epoch, now_s)
            self._loads[slot.slot_id] = (epoch, load)
            self._fitters[role].add(load.running, load.context_tokens, load.tokens_per_s, now_s)
            if load.first_token_s > 0:
                self._first_tokens_s.append(load.first_token_s)
                self._first_token_s[role].append(load.first_token_s)
        return None

    def take_sequences(self) -> dict[Role, SequenceReport]:
        """What engines told of sequences since the last call, by role; running ones of slots that serve the role."""
        told: dict[Role, list[SequenceReport]] = {}
        for (slot_id, role), engine in self._engines.items():
            report = engine.sequences()
            slot = self._table[slot_id]
            is_told = slot.is_serving(role) and self._loads.get(slot_id, (-1,))[0] == slot.epoch
            told.setdefault(role, []).append(report if is_told else SequenceReport((), report.ended))
        return {
            role: SequenceReport(
                tuple(state for report in reports for state in report.running),
                tuple(end for report in reports for end in report.ended),
            )
            for role, reports in told.items()
        }

    def undelayed_first_token_s(self) -> dict[Role, float]:
        """Time to the first token of a request that waited for nothing, by role; absent where none was reported."""
        return {
            role: sorted(seconds)[int(UNDELAYED * len(seconds))]
            for role, seconds in self._first_token_s.items()
            if seconds
        }

    def loads(self, role: Role) -> list[ReplicaLoad]:
        """Of the slots that serve ``role``."""
        return [self.load_of(slot) for slot in self._table.serving(role)]

    def take_first_tokens_s(self) -> list[float]:
        """Times to the first token that were reported since the last call."""
        taken, self._first_tokens_s = self._first_tokens_s, []
        return taken

    def load_of(self, slot: Slot) -> ReplicaLoad:
        """Last report of the slot's serving engine; zeros when it has not reported since it took its role."""
        epoch, load = self._loads.get(slot.slot_id, (-1, ReplicaLoad()))
        return load if epoch == slot.epoch else ReplicaLoad()

    def context_tokens(self, role: Role) -> float:
        """Mean tokens that one running sequence of ``role`` holds; 0 when none runs."""
        loads = self.loads(role)
        running = sum(load.running for load in loads)
        return sum(load.context_tokens for load in loads) / running if running else 0.0

    def decode_costs(self) -> dict[Role, DecodeCost]:
        """Fitted cost by role; a role without enough reports is absent."""
        fits = {role: fitter.fit() for role, fitter in self._fitters.items()}
        return {role: fit for role, fit in fits.items() if fit is not None}

    def views(self) -> tuple[SlotView, ...]:
        return tuple(self._view(slot) for slot in self._table.values())

    def event(self, demand: Mapping[Role, RoleDemand]) -> dict[str, Any]:
        """Fields of a ``load`` event."""
        slots = {}
        for slot in self._table.values():
            load = self.load_of(slot)
            slots[str(slot.slot_id)] = {
                "role": str(slot.role),
                "status": str(slot.status),
                "running": load.running,
                "waiting": load.waiting,
                "tokens_per_s": load.tokens_per_s,
                "context_tokens": load.context_tokens,
                "first_token_s": load.first_token_s,
            }
        return {"slots": slots, "queued": {str(role): d.queued for role, d in demand.items()}}

    def _view(self, slot: Slot) -> SlotView:
        dead = {r for r, state in slot.engines.items() if state is EngineState.DEAD} if self._hides_dead else set()
        return SlotView(
            slot_id=slot.slot_id,
            role=slot.role,
            status=slot.status,
            can_host=slot.can_host - dead,
            since_s=slot.since_s,
            load=self.load_of(slot),
            target=slot.target if slot.status is SlotStatus.SHIFTING else None,
        )


def demand_of(admissions: Mapping[Role, AdmissionPort]) -> dict[Role, RoleDemand]:
    """Work that waits outside the engines, by inference role."""
    return {role: RoleDemand(port.queued(), sum(port.inflight().values())) for role, port in admissions.items()}
