"""A small world around a planner: requests arrive, slots decode them, judge requests follow, training takes batches.

Time goes in fixed steps. Coarse on purpose: it shows whether plans starve, deadlock or thrash, not how fast they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from core_cases import GENRM, ROLLOUT, TRAIN

from verl_pivot.core.costs import DecodeCost, DecodeCostFitter, ShiftCosts
from verl_pivot.core.plan import Plan, Planner
from verl_pivot.core.snapshot import (
    LeaseState,
    ReplicaLoad,
    Role,
    RoleDemand,
    SlotStatus,
    SlotView,
    Snapshot,
    TrainView,
)

STEP_S = 0.25
PLAN_EVERY_S = 1.0


@dataclass
class Slot:
    slot_id: int
    role: Role
    can_host: frozenset[Role]
    since_s: float = 0.0
    target: Role | None = None
    ready_s: float = 0.0
    failed: bool = False
    remaining: list[float] = field(default_factory=list)
    """Tokens that each running sequence still has to generate."""
    tokens_per_s: float = 0.0


@dataclass
class World:
    """``group``: finished judge requests that make one group; training takes ``groups_needed`` groups for
    ``update_s`` seconds."""

    planner: Planner
    slots: Sequence[Slot]
    cost: DecodeCost
    random: random.Random
    shift_s: float = 2.0
    batch_limit: int = 16
    groups_needed: int = 8
    update_s: float = 6.0
    now_s: float = 0.0
    queue: dict[Role, list[float]] = field(default_factory=lambda: {ROLLOUT: [], GENRM: []})
    lease: LeaseState = LeaseState.FREE
    lease_until_s: float = 0.0
    groups_ready: int = 0
    updates: int = 0
    judged: int = 0
    last_shift_s: float | None = None
    starving_since_s: dict[Role, float] = field(default_factory=dict)
    longest_starvation_s: float = 0.0
    plans: list[tuple[float, Plan]] = field(default_factory=list)
    fitters: dict[Role, DecodeCostFitter] = field(
        default_factory=lambda: {ROLLOUT: DecodeCostFitter(), GENRM: DecodeCostFitter()}
    )

    def submit(self, requests: int) -> None:
        self.queue[ROLLOUT] += [self.random.lognormvariate(3.5, 0.8) for _ in range(requests)]

    @property
    def unfinished(self) -> int:
        return sum(len(queue) for queue in self.queue.values()) + sum(len(slot.remaining) for slot in self.slots)

    @property
    def training_due(self) -> bool:
        return self.lease is not LeaseState.FREE or self.groups_ready >= self.groups_needed

    def step(self) -> None:
        self._finish_shifts()
        self._train()
        self._admit()
        self._decode()
        self._watch_starvation()
        if round(self.now_s / STEP_S) % round(PLAN_EVERY_S / STEP_S) == 0:
            self._plan()
        self.now_s += STEP_S

    def fail(self, slot: Slot) -> None:
        """The slot's engine dies; its sequences go back to the queue."""
        self._evict(slot)
        slot.failed, slot.target = True, None

    def _serving(self, role: Role) -> list[Slot]:
        return [slot for slot in self.slots if slot.role is role and not slot.target and not slot.failed]

    def _finish_shifts(self) -> None:
        for slot in self.slots:
            if slot.target and self.now_s >= slot.ready_s:
                slot.role, slot.target, slot.since_s = slot.target, None, self.now_s

    def _train(self) -> None:
        able = [slot for slot in self.slots if TRAIN in slot.can_host and not slot.failed]
        if self.lease is LeaseState.FREE and able and self.groups_ready >= self.groups_needed:
            self.lease = LeaseState.WANTED
        if self.lease is LeaseState.WANTED and all(slot.role is TRAIN and not slot.target for slot in able):
            self.lease, self.lease_until_s = LeaseState.HELD, self.now_s + self.update_s
            self.groups_ready -= self.groups_needed
        if self.lease is LeaseState.HELD and self.now_s >= self.lease_until_s:
            self.lease = LeaseState.FREE
            self.updates += 1

    def _admit(self) -> None:
        for role, queue in self.queue.items():
            while queue:
                room = [slot for slot in self._serving(role) if len(slot.remaining) < self.batch_limit]
                if not room:
                    break
                min(room, key=lambda slot: len(slot.remaining)).remaining.append(queue.pop(0))

    def _decode(self) -> None:
        for slot in self.slots:
            slot.tokens_per_s = 0.0
            if not slot.remaining or slot.target or slot.failed:
                continue
            running = len(slot.remaining)
            latency_s = self.cost.step_latency_s(running, 50 * running) * self.random.uniform(0.95, 1.05)
            slot.tokens_per_s = running / latency_s
            self.fitters[slot.role].add(running, 50 * running, slot.tokens_per_s, self.now_s)
            left = [tokens - STEP_S / latency_s for tokens in slot.remaining]
            slot.remaining = [tokens for tokens in left if tokens > 0]
            self._finish(slot.role, running - len(slot.remaining))

    def _finish(self, role: Role, sequences: int) -> None:
        if role is ROLLOUT:
            self.queue[GENRM] += [self.random.lognormvariate(3.0, 0.5) for _ in range(sequences)]
        else:
            self.judged += sequences
            self.groups_ready += sequences

    def _watch_starvation(self) -> None:
        for role, queue in self.queue.items():
            if queue and not self._serving(role) and self.lease is LeaseState.FREE:
                since_s = self.starving_since_s.setdefault(role, self.now_s)
                self.longest_starvation_s = max(self.longest_starvation_s, self.now_s - since_s)
            else:
                self.starving_since_s.pop(role, None)

    def _plan(self) -> None:
        result = self.planner.plan(self.snapshot())
        self.plans.append((self.now_s, result))
        by_id = {slot.slot_id: slot for slot in self.slots}
        for shift in result.shifts:
            slot = by_id[shift.slot_id]
            self._evict(slot)
            slot.target, slot.ready_s = shift.target, self.now_s + self.shift_s * self.random.uniform(0.5, 1.5)
            self.last_shift_s = self.now_s

    def _evict(self, slot: Slot) -> None:
        if slot.remaining:
            self.queue[slot.role] += slot.remaining
            slot.remaining = []

    def snapshot(self) -> Snapshot:
        views = []
        for slot in self.slots:
            status = SlotStatus.FAILED if slot.failed else SlotStatus.SHIFTING if slot.target else SlotStatus.SERVING
            running = len(slot.remaining)
            load = ReplicaLoad(running, 0, 50 * running, slot.tokens_per_s)
            views.append(SlotView(slot.slot_id, slot.role, status, slot.can_host, slot.since_s, load, slot.target))
        inflight = {role: sum(len(slot.remaining) for slot in self._serving(role)) for role in self.queue}
        fits = {role: fitter.fit() for role, fitter in self.fitters.items()}
        return Snapshot(
            now_s=self.now_s,
            slots=tuple(views),
            demand={role: RoleDemand(len(queue), inflight[role]) for role, queue in self.queue.items()},
            train=TrainView(self.lease, self.groups_ready, self.groups_needed),
            decode={role: fit for role, fit in fits.items() if fit is not None},
            shift_costs=ShiftCosts(default_s=self.shift_s, migrate_s=0.5),
            last_shift_s=self.last_shift_s,
        )
