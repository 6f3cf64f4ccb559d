"""Simulated slots: which role each has, its engine in that role, and the shifts between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import simpy

from verl_pivot.core.plan import Shift
from verl_pivot.core.snapshot import INFERENCE_ROLES, ReplicaLoad, Role, SlotStatus, SlotView
from verl_pivot.sim.engine import EngineCounts, SimEngine, SimSequence
from verl_pivot.sim.router import SimRouter
from verl_pivot.sim.scenario import Scenario


@dataclass
class SimSlot:
    """One slot. ``engine`` is the awake engine; None while it trains, shifts or has failed."""

    slot_id: int
    role: Role
    can_host: frozenset[Role]
    status: SlotStatus = SlotStatus.SERVING
    since_s: float = 0.0
    target: Role | None = None
    engine: SimEngine | None = None
    alarm: int = 0
    """Number of the last timeout set for the engine; earlier ones ring unheard."""


@dataclass(frozen=True)
class ShiftRecord:
    """One shift that ended."""

    slot_id: int
    source: Role
    target: Role
    start_s: float
    end_s: float
    evicted: int
    reason: str


class SimSlots:
    """All slots of a run. ``on_ended(role, sequences)``: sequences that engines have finished."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        slots: list[SimSlot],
        on_ended: Callable[[Role, list[SimSequence]], None],
        on_shifted: Callable[[], None],
    ) -> None:
        self._env, self._scenario = env, scenario
        self._on_ended, self._on_shifted = on_ended, on_shifted
        self.slots = {slot.slot_id: slot for slot in slots}
        self.routers = {
            role: SimRouter(lambda: env.now, lambda slot_id: self._sync(self.slots[slot_id]), self._rearm)
            for role in INFERENCE_ROLES
        }
        self.specs = scenario.engines
        self.counts: dict[Role, EngineCounts] = {role: EngineCounts() for role in INFERENCE_ROLES}
        """Of engines that are gone."""
        self.shifts: list[ShiftRecord] = []
        self.shifting_s = 0.0
        self.last_shift_s: float | None = None

    def start(self) -> None:
        """Every slot comes up in its first role."""
        for slot in self.slots.values():
            self._open(slot)

    def views(self) -> tuple[SlotView, ...]:
        nothing = ReplicaLoad()
        return tuple(
            SlotView(
                slot.slot_id,
                slot.role,
                slot.status,
                slot.can_host,
                slot.since_s,
                slot.engine.load() if slot.engine else nothing,
                slot.target,
            )
            for slot in self.slots.values()
        )

    def all_train(self) -> bool:
        """Every slot that can train does."""
        able = self._able_to_train()
        return bool(able) and all(s.role is Role.TRAIN and s.status is SlotStatus.SERVING for s in able)

    def train_slots(self) -> int:
        """Slots that can train and have not failed."""
        return len(self._able_to_train())

    def _able_to_train(self) -> list[SimSlot]:
        return [s for s in self.slots.values() if Role.TRAIN in s.can_host and s.status is not SlotStatus.FAILED]

    def begin(self, shifts: Iterable[Shift]) -> None:
        """Carry out the shifts of a plan: all their slots close before any sequence goes elsewhere."""
        evicted: dict[Role, list[SimSequence]] = {role: [] for role in INFERENCE_ROLES}
        for shift in shifts:
            slot = self.slots[shift.slot_id]
            if slot.status is not SlotStatus.SERVING or slot.role is shift.target:
                raise ValueError(f"slot {slot.slot_id} ({slot.status}, {slot.role}) cannot shift to {shift.target}")
            if shift.target not in slot.can_host:
                raise ValueError(f"slot {slot.slot_id} cannot host {shift.target}")
            taken = self._close(slot)
            slot.status, slot.target = SlotStatus.SHIFTING, shift.target
            if taken:
                evicted[slot.role] += taken
            self._env.process(self._shift(slot, shift, len(taken)))
        for role, sequences in evicted.items():
            self.routers[role].resubmit(sequences)

    def fail(self, slot_id: int) -> None:
        """The slot is lost; its sequences go elsewhere."""
        slot = self.slots[slot_id]
        evicted = self._close(slot)
        slot.status, slot.target = SlotStatus.FAILED, None
        if slot.role in self.routers:
            self.routers[slot.role].resubmit(evicted)

    def take_version(self) -> None:
        """Awake rollout engines load new weights; what they run is computed anew under them."""
        for slot in self.slots.values():
            if slot.role is Role.ROLLOUT and slot.engine is not None:
                self._sync(slot)
                slot.engine.pause(self._scenario.costs.reload_s, self._env.now)
                slot.engine.recompute(self._env.now)
                self._rearm(slot.slot_id)

    def shed(self, role: Role, slot_id: int, count: int) -> int:
        """A slot gives up sequences to others of its role."""
        slot = self.slots[slot_id]
        if slot.engine is None:
            return 0
        self._sync(slot)
        taken = slot.engine.evict(self._env.now, count)
        self._rearm(slot_id)
        self.routers[role].resubmit(taken)
        return len(taken)

    def sync(self, role: Role) -> None:
        """Bring the engines of ``role`` up to the present."""
        for slot_id in list(self.routers[role].engines):
            self._sync(self.slots[slot_id])

    def totals(self, role: Role) -> EngineCounts:
        """What engines of ``role`` have done so far, those that are gone included."""
        total = EngineCounts(**vars(self.counts[role]))
        for engine in self.routers[role].engines.values():
            _add(total, engine.counts)
        return total

    def role_counts(self) -> Mapping[Role, int]:
        counts = dict.fromkeys(Role, 0)
        for slot in self.slots.values():
            if slot.status is SlotStatus.SERVING:
                counts[slot.role] += 1
        return counts

    def _shift(self, slot: SimSlot, shift: Shift, evicted: int) -> Generator[Any, Any, None]:
        start_s = self._env.now
        self.last_shift_s = start_s
        yield self._env.timeout(self._scenario.costs.shift_s(slot.role, shift.target))
        if slot.status is not SlotStatus.SHIFTING:
            return  # failed meanwhile
        source, slot.role, slot.target = slot.role, shift.target, None
        slot.status, slot.since_s = SlotStatus.SERVING, self._env.now
        self.shifts.append(ShiftRecord(slot.slot_id, source, slot.role, start_s, self._env.now, evicted, shift.reason))
        self.shifting_s += self._env.now - start_s
        self._open(slot)
        self._on_shifted()

    def _open(self, slot: SimSlot) -> None:
        slot.since_s = self._env.now
        if slot.role in self.routers:
            slot.engine = SimEngine(self.specs[slot.role], self._env.now)
            router = self.routers[slot.role]
            router.admit(slot.slot_id, slot.engine)
            # After all slots that open at this instant: the first one would get everything.
            self._env.timeout(0).callbacks.append(lambda _: router.hand_out())

    def _close(self, slot: SimSlot) -> list[SimSequence]:
        if slot.engine is None:
            return []
        self._sync(slot)
        evicted = slot.engine.close(self._env.now)
        _add(self.counts[slot.role], slot.engine.counts)
        self.routers[slot.role].mask(slot.slot_id)
        slot.engine = None
        slot.alarm += 1
        return evicted

    def _sync(self, slot: SimSlot) -> None:
        if slot.engine is None:
            return
        ended = slot.engine.advance(self._env.now)
        if ended:
            self._on_ended(slot.role, ended)

    def _rearm(self, slot_id: int) -> None:
        """Set the alarm for the engine's next event; an earlier alarm will find its number outdated."""
        slot = self.slots[slot_id]
        if slot.engine is None:
            return
        slot.alarm += 1
        number = slot.alarm
        at_s = slot.engine.next_event_s()
        if at_s == float("inf"):
            return
        timeout = self._env.timeout(max(0.0, at_s - self._env.now))
        timeout.callbacks.append(lambda _: self._ring(slot, number))

    def _ring(self, slot: SimSlot, number: int) -> None:
        if number != slot.alarm or slot.engine is None:
            return
        self._sync(slot)
        self._rearm(slot.slot_id)
        self.routers[slot.role].hand_out()


def _add(total: EngineCounts, part: EngineCounts) -> None:
    for name, value in vars(part).items():
        setattr(total, name, getattr(total, name) + value)
