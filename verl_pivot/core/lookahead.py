"""The planner that looks ahead: it plays the coming minutes through under many allocations and takes the best.

What counts is when all known work is done (staleness 0), or how much useful work gets done within the horizon (more
staleness: there is always a next step). Shifts pay for their dead time and for the prefill of what they cut off inside
the projection; what is left must beat a margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core import donors
from verl_pivot.core.fluid import Candidates, Fluid, Projection, RoleModel, TrainModel
from verl_pivot.core.harmonic import HarmonicPlanner
from verl_pivot.core.lease import plan_training
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus, SlotView, Snapshot

Vector = NDArray[np.float64]

STEPS = 28
"""Time steps of a projection."""
READINESS_IN_STEP = 3.0
"""Where all groups began together, most of them get ready late: a group waits for its longest response."""
HORIZON = 1.0
"""Of the time that all known work would take, how far to look where there is always a next step."""
MOST_DEFERRED_S = 120.0
"""Longest that training waits for its slots although a batch is ready."""
INFERENCE = (Role.ROLLOUT, Role.GENRM)


@dataclass(frozen=True)
class _Option:
    """One allocation that could be made, and the slots that would move for it."""

    to_rollout: tuple[SlotView, ...]
    to_genrm: tuple[SlotView, ...]
    lends: bool
    defers: bool = False

    @property
    def moves(self) -> int:
        return len(self.to_rollout) + len(self.to_genrm)


class LookaheadPlanner:
    """Training first, then whatever the projection likes best. Without predicted work it decides as ``harmonic`` does.

    Holds nothing but its settings: equal snapshots give equal plans.
    """

    name: str = "lookahead"

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self._harmonic = HarmonicPlanner(settings)

    def plan(self, snapshot: Snapshot) -> Plan:
        training = plan_training(snapshot)
        roles = _role_models(snapshot)
        if training.shifts:
            return training if roles is None else self._weigh_lease(snapshot, roles, training)
        if roles is None:
            return self._harmonic.plan(snapshot)
        held = self._why_held(snapshot, roles)
        if held:
            return Plan((), f"no shift, because {held}")
        options = self._options(snapshot)
        if len(options) == 1:
            return Plan((), "no shift, because no slot may change role now")
        return self._choose(snapshot, roles, options)

    def _weigh_lease(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], training: Plan) -> Plan:
        """Training gets its lent slots now, or, if that ends the step earlier, once all its batches are ready."""
        train = _train_model(snapshot)
        working = sum(model.backlog.sequences for model in roles.values()) >= 1
        if train.batches_to_publish < 2 or not working or snapshot.train.wanted_s > MOST_DEFERRED_S:
            return training
        horizon_s = self._horizon_s(snapshot, roles, train)
        options = [_Option((), (), True), _Option((), (), True, defers=True)]
        projection = _project(snapshot, roles, train, options, horizon_s, self._patience_s(snapshot))
        now, later = self._gains(snapshot, projection)
        threshold = self.settings.margin * 0.2 * horizon_s * _slot_count(snapshot)
        if later - now < threshold:
            return training
        ready = f"{snapshot.train.groups_ready} groups ready"
        return Plan(
            (), f"no shift, because training waits for all its batches ({ready}): {later - now:.0f} slot-seconds"
        )

    def _patience_s(self, snapshot: Snapshot) -> float:
        return self.settings.cooldown_s + snapshot.shift_costs.seconds(Role.ROLLOUT, Role.GENRM)

    def _gains(self, snapshot: Snapshot, projection: Projection) -> Vector:
        """Slot-seconds over the first candidate."""
        if snapshot.staleness == 0:
            return np.asarray((projection.finish_s[0] - projection.finish_s) * _slot_count(snapshot))
        return np.asarray(projection.work - projection.work[0])

    def _why_held(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> str:
        if all(model.backlog.sequences < 0.5 for model in roles.values()):
            return "no work besides training"
        shifting = sum(slot.status is SlotStatus.SHIFTING for slot in snapshot.slots)
        if shifting:
            return f"{donors.counted(shifting, 'slot')} still shifting"
        if self._starves(snapshot, roles) or snapshot.last_shift_s is None:
            return ""
        left_s = snapshot.last_shift_s + self.settings.cooldown_s - snapshot.now_s
        return f"cooldown {left_s:.1f} s left" if left_s > 0 else ""

    def _starves(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> bool:
        """A role has work and no slot."""
        counts = donors.slot_counts(snapshot)
        return any(roles[role].backlog.sequences >= 0.5 and not counts[role] for role in INFERENCE)

    def _options(self, snapshot: Snapshot) -> list[_Option]:
        """The present allocation first, then every other worth a look."""
        lent = [slot for slot in snapshot.slots if Role.TRAIN in slot.can_host and slot.role is not Role.TRAIN]
        options = [_Option((), (), bool(lent))]
        for target in INFERENCE:
            able = [slot for slot in self._donors(snapshot, target)]
            for count in _counts(len(able)):
                moving = tuple(able[:count])
                lends = bool(lent) or any(slot.role is Role.TRAIN for slot in moving)
                options.append(_Option(moving, (), lends) if target is Role.ROLLOUT else _Option((), moving, lends))
        return options

    def _donors(self, snapshot: Snapshot, target: Role) -> list[SlotView]:
        """Slots that may go to ``target``, cheapest to empty first. Floors stay, and the last slot of a role that has
        work, or is about to get some, unless the other has nothing at all."""
        counts = donors.slot_counts(snapshot)
        rollout = snapshot.backlog[Role.ROLLOUT].sequences >= 0.5
        genrm = rollout or snapshot.backlog[Role.GENRM].sequences >= 0.5
        working = {Role.ROLLOUT: int(rollout), Role.GENRM: int(genrm)}
        if not counts[target]:
            working = dict.fromkeys(working, min(1, sum(counts[role] for role in INFERENCE) - 1))
        spare = {
            role: counts[role] - max(working[role], self.settings.floor(role)) if role in INFERENCE else counts[role]
            for role in Role
        }
        able = []
        for slot in sorted(donors.movable(snapshot, target), key=lambda s: (s.load.context_tokens, s.slot_id)):
            if donors.immunity_left_s(snapshot, self.settings, slot) and slot.load.sequences:
                continue
            if spare[slot.role] > 0:
                spare[slot.role] -= 1
                able.append(slot)
        return able

    def _choose(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], options: list[_Option]) -> Plan:
        train = _train_model(snapshot)
        horizon_s = self._horizon_s(snapshot, roles, train)
        projection = _project(snapshot, roles, train, options, horizon_s, self._patience_s(snapshot))
        slots = _slot_count(snapshot)
        gains = self._gains(snapshot, projection)
        if snapshot.staleness == 0:
            said = f"all work done in {projection.finish_s[0]:.0f} s"
        else:
            said = f"{projection.work[0] / (horizon_s * slots):.0%} of the slots' time is of use over {horizon_s:.0f} s"
        moves = np.array([option.moves for option in options], dtype=np.float64)
        threshold = self.settings.margin * 0.2 * horizon_s * slots
        # A tenth of a second for each moved slot: of equal candidates the one that moves least.
        best = int(np.argmax(gains - 0.1 * moves))
        gain = float(gains[best])
        if best == 0 or gain <= 0.1 * moves[best]:
            return Plan((), f"no shift, because nothing is better than the present roles: {said}")
        after = (
            f"{projection.finish_s[best]:.0f} s"
            if snapshot.staleness == 0
            else f"{projection.work[best] / (horizon_s * slots):.0%}"
        )
        option = options[best]
        moving = option.to_rollout or option.to_genrm
        target = Role.ROLLOUT if option.to_rollout else Role.GENRM
        what = f"{donors.counted(len(moving), 'slot')} to {target}: {said}, then {after}"
        if gain < threshold and not self._starves(snapshot, roles):
            return Plan((), f"no shift, because gain {gain:.0f} slot-seconds under margin {threshold:.0f} for {what}")
        share = gain / len(moving)
        cost_s = {slot.slot_id: _cost_s(snapshot, slot, target) for slot in moving}
        shifts = (Shift(s.slot_id, s.role, target, share, cost_s[s.slot_id], what) for s in moving)
        return Plan(tuple(shifts), what)

    def _horizon_s(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], train: TrainModel) -> float:
        """Enough for all that is known to end (staleness 0), or to be worked on by everybody: a shorter look would
        feed training from what rollout needs next."""
        slots = max(1, sum(s.effective_role in INFERENCE for s in snapshot.slots))
        busy_s, tail_s = 0.0, 0.0
        for model in roles.values():
            busy_s += model.backlog.tokens / model.peak_tokens_per_s
            tail = model.backlog.remaining_tokens[-1] if len(model.backlog.remaining_tokens) else 0.0
            tail_s += tail * model.decode.step_latency_s(1, model.context_tokens)
        judge = roles[Role.GENRM]
        busy_s += roles[Role.ROLLOUT].backlog.sequences * judge.backlog.new_mean_tokens / judge.peak_tokens_per_s
        batches = (train.groups_open + train.groups_ready) / max(1.0, train.groups_needed)
        if snapshot.staleness:
            whole_s = (busy_s + batches * train.update_s * train.slots) / _slot_count(snapshot)
            return max(self.settings.window_s, HORIZON * whole_s)
        return 30.0 + 1.5 * busy_s / slots + tail_s + batches * train.update_s


def _slot_count(snapshot: Snapshot) -> int:
    return sum(slot.effective_role is not None for slot in snapshot.slots)


def _project(
    snapshot: Snapshot,
    roles: Mapping[Role, RoleModel],
    train: TrainModel,
    options: list[_Option],
    horizon_s: float,
    patience_s: float,
) -> Projection:
    make = _Rows(snapshot)
    rows = np.array([make.row(option) for option in options], dtype=np.float64)
    lends = np.array([option.lends for option in options])
    defers = np.array([option.defers for option in options])
    numbers = dict(zip(_ROW, rows.T, strict=True))
    candidates = Candidates(lends=lends, defers=defers, **numbers)
    growing = np.linspace(0.4, 1.6, STEPS)
    readiness = READINESS_IN_STEP if snapshot.staleness == 0 else 1.0
    return Fluid(roles, train, candidates, readiness, patience_s).project(growing * horizon_s / STEPS)


_ROW = (
    "rollout",
    "genrm",
    "rollout_meanwhile",
    "genrm_meanwhile",
    "shift_s",
    "rollout_debt_s",
    "genrm_debt_s",
    "lent_rollout_share",
)


class _Rows:
    """Turns options into rows of numbers, the fields of ``Candidates`` that ``_ROW`` names."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._own, self._lent = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
        for slot in snapshot.slots:
            role = slot.effective_role
            if role is not None:
                (self._lent if Role.TRAIN in slot.can_host else self._own)[role] += 1

    def row(self, option: _Option) -> tuple[float, ...]:
        shift_s, debt_s = 0.0, dict.fromkeys(Role, 0.0)
        meanwhile, after, lent = dict(self._own), dict(self._own), dict(self._lent)
        target = Role.ROLLOUT if option.to_rollout else Role.GENRM
        for slot in option.to_rollout or option.to_genrm:
            shift_s = max(shift_s, self._snapshot.shift_costs.seconds(slot.role, target))
            if slot.role in INFERENCE:
                prefill_s = self._snapshot.prefill_s_per_token.get(slot.role, 0.0)
                debt_s[slot.role] += slot.load.context_tokens * prefill_s
            if Role.TRAIN in slot.can_host:
                lent[slot.role] -= 1
                lent[target] += 1
            else:
                meanwhile[slot.role] -= 1
                after[slot.role] -= 1
                after[target] += 1
        serving = lent[Role.ROLLOUT] + lent[Role.GENRM]
        return (
            after[Role.ROLLOUT],
            after[Role.GENRM],
            meanwhile[Role.ROLLOUT],
            meanwhile[Role.GENRM],
            shift_s,
            debt_s[Role.ROLLOUT],
            debt_s[Role.GENRM],
            lent[Role.ROLLOUT] / serving if serving else 0.5,
        )


def _counts(most: int) -> list[int]:
    """How many slots a candidate moves: each number up to 8, then ever wider apart."""
    wanted = [*range(1, 9), *(round(8 * 1.25**k) for k in range(1, 40))]
    return sorted({count for count in wanted if count < most} | ({most} if most else set()))


def _role_models(snapshot: Snapshot) -> dict[Role, RoleModel] | None:
    """None when work or costs are not known yet."""
    models = {}
    for role in INFERENCE:
        if role not in snapshot.backlog or role not in snapshot.decode:
            return None
        serving = snapshot.serving(role)
        running = sum(slot.load.running for slot in serving)
        context_tokens = sum(slot.load.context_tokens for slot in serving) / running if running else 1000.0
        models[role] = RoleModel(
            snapshot.decode[role],
            context_tokens,
            snapshot.batch_limit.get(role, 256.0),
            snapshot.prefill_s_per_token.get(role, 0.0),
            snapshot.backlog[role],
        )
    return models


def _train_model(snapshot: Snapshot) -> TrainModel:
    train, costs = snapshot.train, snapshot.shift_costs
    slots = [slot for slot in snapshot.slots if Role.TRAIN in slot.can_host and slot.effective_role is not None]
    return TrainModel(
        slots=len(slots),
        is_lent=any(slot.role is not Role.TRAIN for slot in slots),
        busy_s=train.busy_s if train.lease is LeaseState.HELD else 0.0,
        update_s=train.update_s,
        groups_ready=train.groups_ready,
        groups_needed=max(1, train.groups_needed),
        groups_open=train.groups_open,
        batches_to_publish=train.batches_to_publish,
        arrivals=train.new_prompts,
        to_train_s=costs.seconds(Role.ROLLOUT, Role.TRAIN),
        from_train_s=costs.seconds(Role.TRAIN, Role.ROLLOUT),
    )


def _cost_s(snapshot: Snapshot, slot: SlotView, target: Role) -> float:
    """Slot-seconds that one shift costs: its dead time and the prefill of what it cuts off."""
    prefill_s = slot.load.context_tokens * snapshot.prefill_s_per_token.get(slot.role, 0.0)
    return snapshot.shift_costs.seconds(slot.role, target) + (prefill_s if math.isfinite(prefill_s) else 0.0)
