"""A small world in which every allocation can be tried out: exact engines, known lengths, one plan, then simple rules.

After the plan, slots whose role has nothing left to do, now or later, go to the other one, and sequences are evened out
as the controller of a run does it; nothing else happens unless a later planner is given. So the finish of each option
is a fact, and the planner's choice can be held against the best. Planners are told each sequence's true lengths and
which judgement it will get, so what they lose is lost by projecting, not by predicting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from core_cases import GENRM, INFERENCE, ROLLOUT

from verl_pivot.core.backlog import Backlog, GroupBacklog
from verl_pivot.core.cost_book import RoleCosts
from verl_pivot.core.costs import DecodeCost, ShiftCosts
from verl_pivot.core.evening import excess
from verl_pivot.core.options import Option
from verl_pivot.core.plan import Planner
from verl_pivot.core.snapshot import Role, RoleDemand, SlotStatus, SlotView, Snapshot, TrainView
from verl_pivot.sim.engine import SimEngine, SimSequence
from verl_pivot.sim.router import running_like

SHIFT_S = 2.0
EVENING_S = 1.0
"""Between two times that sequences are evened out."""


@dataclass
class Case:
    """Slots' roles and the sequences on each; judgement lengths by sequence."""

    roles: list[Role]
    rollout: list[list[SimSequence]]
    genrm: list[list[SimSequence]]
    judgement_tokens: dict[int, int]
    specs: dict[Role, RoleCosts]

    def copy(self) -> Case:
        def fresh(slots: list[list[SimSequence]]) -> list[list[SimSequence]]:
            return [[SimSequence(s.key, s.prompt_tokens, s.total_tokens) for s in slot] for slot in slots]

        return Case(list(self.roles), fresh(self.rollout), fresh(self.genrm), dict(self.judgement_tokens), self.specs)


@dataclass
class _Slot:
    role: Role
    engine: SimEngine | None
    ready_s: float = 0.0


@dataclass
class World:
    case: Case
    later: Planner | None = None
    """Plans every ``later_s`` seconds after the first plan; None: nobody does."""
    later_s: float = math.inf
    now_s: float = 0.0
    planned_s: float = 0.0
    evened_s: float = -math.inf
    slots: list[_Slot] = field(default_factory=list)
    queue: dict[Role, list[SimSequence]] = field(default_factory=lambda: {ROLLOUT: [], GENRM: []})

    def __post_init__(self) -> None:
        for at, role in enumerate(self.case.roles):
            inside, spec = (self.case.rollout if role is ROLLOUT else self.case.genrm)[at], self.case.specs[role]
            began_s = -spec.prefill_s_per_token * sum(sequence.prompt_tokens for sequence in inside)
            engine = SimEngine(spec, began_s)  # at 0 s all are prefilled
            for sequence in inside:
                engine.submit(sequence, began_s)
            self.slots.append(_Slot(role, engine))

    def view(self) -> Snapshot:
        """What a planner sees while no slot shifts: true lengths, and what each sequence will be judged for."""
        views = []
        for at, slot in enumerate(self.slots):
            assert slot.engine is not None
            views.append(SlotView(at, slot.role, SlotStatus.SERVING, INFERENCE, -100.0, slot.engine.load()))
        responses = self._open(ROLLOUT)
        judge = np.sort(np.array([float(self.case.judgement_tokens[s.key]) for s in responses]))
        backlog = {}
        for role in (ROLLOUT, GENRM):
            left = np.sort(np.array([float(s.remaining_tokens) for s in self._open(role)]))
            backlog[role] = Backlog(left, 1.0, judge if role is GENRM else np.array([1.0]), 50.0)
        return Snapshot(
            now_s=self.now_s,
            slots=tuple(views),
            demand={role: RoleDemand(0, round(work.sequences)) for role, work in backlog.items()},
            train=TrainView(groups_needed=len(self.case.judgement_tokens)),
            groups=self._groups(),
            decode={role: spec.decode for role, spec in self.case.specs.items()},
            shift_costs=ShiftCosts(default_s=SHIFT_S, migrate_s=0.1),
            backlog=backlog,
            prefill_s_per_token={role: spec.prefill_s_per_token for role, spec in self.case.specs.items()},
            batch_limit={role: float(spec.max_sequences) for role, spec in self.case.specs.items()},
        )

    def _groups(self) -> GroupBacklog:
        """Each sequence is a group of its own, and the batch is all of them: done is when the last one is judged."""
        rollout, genrm = self._open(ROLLOUT), self._open(GENRM)
        respond = np.array([float(s.remaining_tokens) for s in rollout] + [-1.0] * len(genrm))
        judged = [self.case.judgement_tokens[s.key] for s in rollout] + [s.remaining_tokens for s in genrm]
        return GroupBacklog(respond, np.array(judged, dtype=np.float64), np.zeros(len(judged), dtype=bool))

    def _open(self, role: Role) -> list[SimSequence]:
        return [s for slot in self.slots if slot.role is role and slot.engine for s in slot.engine.inside()]

    def finish_s(self, option: Option) -> float:
        """When everything is judged, if the slots of ``option`` move now."""
        for view, target in option.moves:
            self._move(self.slots[view.slot_id], target)
        while self._work_left():
            self._hand_out()
            self._even_out()
            self._follow_the_work()
            self._plan_again()
            at_s = min(self._next_events())
            assert math.isfinite(at_s), "nothing can happen any more"
            self.now_s = at_s
            self._advance()
        return self.now_s

    def _move(self, slot: _Slot, target: Role) -> None:
        assert slot.engine is not None
        slot.engine.advance(self.now_s)
        self.queue[slot.role] += slot.engine.close(self.now_s)
        slot.engine, slot.role, slot.ready_s = None, target, self.now_s + SHIFT_S

    def _work_left(self) -> bool:
        return any(self.queue.values()) or any(slot.engine and slot.engine.sequences for slot in self.slots)

    def _follow_the_work(self) -> None:
        """Slots of a role that has nothing to do go to the other while that has more sequences than slots."""
        for role, other in ((ROLLOUT, GENRM), (GENRM, ROLLOUT)):
            inside = {r: sum(s.engine.sequences for s in self.slots if s.role is r and s.engine) for r in self.queue}
            work = {r: inside[r] + len(self.queue[r]) for r in self.queue}
            slots = {r: sum(slot.role is r for slot in self.slots) for r in self.queue}
            for slot in self.slots:
                idle = slot.role is role and slot.engine is not None and not slot.engine.sequences
                spare = slots[role] > (role is GENRM and work[other] > 0)  # judgements will come
                if idle and spare and not work[role] and work[other] > slots[other]:
                    slots[role] -= 1
                    self._move(slot, other)
                    slots[other] += 1

    def _plan_again(self) -> None:
        """At the first event after ``later_s`` at which all slots serve."""
        if (
            self.later is None
            or self.now_s < self.planned_s + self.later_s
            or any(s.engine is None for s in self.slots)
        ):
            return
        self.planned_s = self.now_s
        for slot in self.slots:
            if slot.engine is not None:
                slot.engine.advance(self.now_s)
        for shift in self.later.plan(self.view()).shifts:
            self._move(self.slots[shift.slot_id], shift.target)

    def _hand_out(self) -> None:
        for role, queue in self.queue.items():
            engines = [slot.engine for slot in self.slots if slot.role is role and slot.engine is not None]
            for engine in engines:
                engine.advance(self.now_s)
            while queue and engines:
                min(engines, key=lambda engine: engine.sequences).submit(queue.pop(0), self.now_s)

    def _even_out(self) -> None:
        """What is too much for one slot goes to others, as the controller of a run does it."""
        if self.now_s < self.evened_s + EVENING_S:
            return
        for role, queue in self.queue.items():
            engines = {at: slot.engine for at, slot in enumerate(self.slots) if slot.role is role and slot.engine}
            spec = self.case.specs[role]
            each = running_like(engines.values(), spec.prefill_s_per_token)
            counts = {at: engine.sequences for at, engine in engines.items()}
            too_many = {} if queue else excess(counts, spec.decode, each)
            for at, count in too_many.items():
                self.evened_s = self.now_s
                queue += engines[at].evict(self.now_s, count)
        self._hand_out()

    def _next_events(self) -> list[float]:
        return [slot.engine.next_event_s() if slot.engine else slot.ready_s for slot in self.slots]

    def _advance(self) -> None:
        for slot in self.slots:
            if slot.engine is None:
                if slot.ready_s <= self.now_s + 1e-9:
                    slot.engine = SimEngine(self.case.specs[slot.role], self.now_s)
                continue
            for ended in slot.engine.advance(self.now_s):
                if slot.role is ROLLOUT:
                    tokens = self.case.judgement_tokens[ended.key]
                    self.queue[GENRM].append(SimSequence(ended.key, 50, tokens))


def draw(seed: int) -> Case:
    """Two to five slots, up to 40 sequences, any tail; decode costs from latency-bound to compute-bound."""
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(2, 6))
    roles = [ROLLOUT if rng.random() < 0.5 else GENRM for _ in range(slots)]
    roles[0], roles[-1] = ROLLOUT, GENRM
    per_seq_s = float(np.exp(rng.uniform(-8, -5)))
    specs = {
        role: RoleCosts(DecodeCost(0.02, 0.01, per_seq_s * rng.uniform(0.5, 2)), float(rng.uniform(0, 1e-3)), 10**6, 64)
        for role in (ROLLOUT, GENRM)
    }
    sigma, median = float(rng.uniform(0.2, 1.2)), float(np.exp(rng.uniform(4, 6.5)))

    def length() -> int:
        return max(1, int(median * np.exp(sigma * rng.standard_normal())))

    case = Case(roles, [[] for _ in roles], [[] for _ in roles], {}, specs)
    for key in range(int(rng.integers(2, 41))):
        judging = rng.random() < 0.3
        at = int(rng.choice([n for n, role in enumerate(roles) if role is (GENRM if judging else ROLLOUT)]))
        (case.genrm if judging else case.rollout)[at].append(SimSequence(key, 50, length()))
        case.judgement_tokens[key] = length()
    return case
