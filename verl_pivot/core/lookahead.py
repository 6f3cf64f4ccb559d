"""The planner that looks ahead: it plays the coming minutes through under many allocations and takes the best.

What counts is when all known work is done (staleness 0), or how much useful work is done late in the horizon (more
staleness: there is always a next step). Shifts pay for their dead time and for the prefill of what they cut off inside
the projection; what is left must beat a margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_pivot.core import donors
from verl_pivot.core.backlog import Vector
from verl_pivot.core.fluid import Fluid
from verl_pivot.core.foresight import horizon_s, role_models, slot_count, train_model
from verl_pivot.core.harmonic import HarmonicPlanner
from verl_pivot.core.lease import plan_training
from verl_pivot.core.options import Option, candidates_of, move_cost_s, options_of
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.role_model import RoleModel
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role, SlotStatus, Snapshot

STEPS = 36
"""Time steps of a projection, the first ones shorter than the last."""
LATE = 0.5
"""Of the horizon, the part in which work is looked at, as it stands there on average. By chance an update, or the last
response that one waits for, ends shortly before the end of the horizon or after it."""
PATIENCE = 0.35
"""Of the horizon, for which a projection counts on no later plan. What a later plan might as well do is put off, and
put off again by that one."""
CAUTION = 0.5
"""Of what its moves cost: by how much an option must be better than none, since projections err."""
CAUTION_SHARE = {True: 0.02, False: 0.06}
"""Of all slot-time up to the horizon, the same for every option that moves anything: at staleness 0, and beyond it,
where more is unknown of what comes."""
SECONDED = 0.5
"""Of the doubts is left where the harmonic rule would do the same, or more of it."""
NOISE_SHARE = 0.003
"""Of all slot-time up to the horizon: what the harmonic rule would do, or some of it, must be better by more than that
than to stay. Ties are common where sequences are few, and a shift that brings nothing still costs."""
DEFER_SHARE = 0.02
"""Of all slot-time up to the horizon, by how much waiting must be better before training waits."""
MOST_DEFERRED_S = 120.0
"""Longest that training waits for its slots although a batch is ready."""


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What was projected for a list of options; the first is the present allocation."""

    value: Vector
    """When all work is done (s), or the useful slot-seconds late in the horizon [options]."""
    gains: Vector
    """Slot-seconds over the present allocation [options]."""
    horizon_s: float
    slots: int
    is_step: bool
    """Counted is when all work is done, else how much is within the horizon."""

    def words(self, option: int) -> str:
        if self.is_step:
            return f"all work done in {self.value[option]:.0f} s"
        return f"{self.value[option] / ((1 - LATE / 2) * self.horizon_s * self.slots):.0%} of slot-time of use"

    def share_s(self, share: float) -> float:
        """A share of all slot-time up to the horizon."""
        return share * self.horizon_s * self.slots


class LookaheadPlanner:
    """Training first, then the allocation whose projection is best. What the harmonic rule would do is one of them, and
    is done unless another is clearly better; without predicted work it decides alone.

    Holds nothing but its settings: equal snapshots give equal plans.
    """

    name: str = "lookahead"

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self._harmonic = HarmonicPlanner(settings)

    def plan(self, snapshot: Snapshot) -> Plan:
        training, suggested = plan_training(snapshot), self._harmonic.plan(snapshot)
        roles = role_models(snapshot)
        if roles is None:
            return suggested
        waits = self._why_training_waits(snapshot, roles) if training.shifts else ""
        if waits:
            suggested = Plan((), f"no shift, because {waits}")
        elif training.shifts:
            return training
        held = self._why_held(snapshot, roles)
        options = options_of(snapshot, self.settings, suggested, held=bool(held))
        if len(options) == 1:
            return Plan((), f"no shift, because {waits or held or 'no slot may change role now'}")
        chosen = self._choose(snapshot, roles, options)
        return suggested if waits and not chosen.shifts else chosen

    def _why_training_waits(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> str:
        """Why training is better served once all its batches are ready; empty when it gets its lent slots now."""
        train = snapshot.train
        working = any(model.backlog.sequences >= 1 for model in roles.values())
        if snapshot.staleness or train.batches_to_publish < 2 or not working or train.wanted_s > MOST_DEFERRED_S:
            return ""
        options = [Option(waits_for=batches) for batches in range(1, train.batches_to_publish + 1)]
        outcome = self._project(snapshot, roles, options)
        best = int(np.argmax(outcome.gains))
        if outcome.gains[best] < outcome.share_s(DEFER_SHARE):
            return ""
        ready = donors.counted(train.groups_ready, "group")
        return (
            f"training waits for {best + 1} batches: {ready} ready, {outcome.words(0)}, waiting {outcome.words(best)}"
        )

    def _why_held(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> str:
        """Why nothing may shift now that is not free; empty when something may."""
        if all(model.backlog.sequences < 0.5 for model in roles.values()):
            return "no work besides training"
        shifting = sum(slot.status is SlotStatus.SHIFTING for slot in snapshot.slots)
        if shifting:
            return f"{donors.counted(shifting, 'slot')} still shifting"
        if snapshot.last_shift_s is None:
            return ""
        left_s = snapshot.last_shift_s + self.settings.cooldown_s - snapshot.now_s
        return f"cooldown {left_s:.1f} s left" if left_s > 0 else ""

    def _choose(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], options: list[Option]) -> Plan:
        """The best option, if it is clearly better than to stay or to follow the harmonic rule; for a role that has
        work and no slot the best that feeds it, whatever it costs."""
        outcome = self._project(snapshot, roles, options)
        starved = _starved(snapshot, roles)
        allowed = np.array([starved is None or option.feeds(starved) for option in options])
        allowed |= not allowed.any()
        gains = np.where(allowed, outcome.gains, -np.inf)
        fallback = int(np.argmax(allowed))
        doubts_s = np.array([self._doubt_s(snapshot, option, outcome) for option in options])
        if starved is not None and options[fallback].moves:
            doubts_s[:] = 0.0  # something must move
        else:
            seconded = [number for number, option in enumerate(options) if option.seconded and allowed[number]]
            doubts_s[seconded] *= SECONDED
            likely = max(seconded, key=lambda number: (gains[number], -len(options[number].moves)), default=fallback)
            fallback = likely if gains[likely] >= gains[fallback] + outcome.share_s(NOISE_SHARE) else fallback
        best = int(np.argmax(gains - doubts_s))
        if gains[best] - doubts_s[best] <= gains[fallback]:
            best = fallback
        option = options[best]
        if not option.moves:
            return Plan((), f"no shift, because {self._why_stay(options, outcome, doubts_s)}")
        what = f"{option}: {outcome.words(0)}, then {outcome.words(best)}, in the next {outcome.horizon_s:.0f} s"
        share = float(outcome.gains[best]) / len(option.moves)
        shifts = (
            Shift(slot.slot_id, slot.role, target, share, move_cost_s(snapshot, slot, target), what)
            for slot, target in option.moves
        )
        return Plan(tuple(shifts), what)

    def _doubt_s(self, snapshot: Snapshot, option: Option, outcome: _Outcome) -> float:
        """Slot-seconds by which ``option`` must be better than one that needs no trust; ``margin`` scales it."""
        if not option.moves:
            return 0.0
        cost_s = sum(move_cost_s(snapshot, slot, target) for slot, target in option.moves)
        return self.settings.margin / 0.05 * (CAUTION * cost_s + outcome.share_s(CAUTION_SHARE[outcome.is_step]))

    def _why_stay(self, options: list[Option], outcome: _Outcome, doubts_s: Vector) -> str:
        moving = [number for number, option in enumerate(options) if option.moves]
        best = max(moving, key=lambda number: outcome.gains[number])
        gain = float(outcome.gains[best])
        if gain <= 0:
            return f"nothing is better than the present roles: {outcome.words(0)}"
        what = f"{options[best]}: {outcome.words(0)}, then {outcome.words(best)}"
        return f"gain {gain:.0f} slot-seconds under margin {doubts_s[best]:.0f} for {what}"

    def _project(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], options: list[Option]) -> _Outcome:
        train = train_model(snapshot)
        look_s = horizon_s(snapshot, roles, train, self.settings.window_s)
        shift_s = snapshot.shift_costs.seconds(Role.ROLLOUT, Role.GENRM)
        patience_s = max(self.settings.cooldown_s + shift_s, PATIENCE * look_s)
        steps_s = np.linspace(0.4, 1.6, STEPS) * look_s / STEPS
        projection = Fluid(roles, train, candidates_of(snapshot, options), patience_s, shift_s).project(steps_s, LATE)
        slots = slot_count(snapshot)
        # Whether training lends its slots again is decided later: the better of the two counts.
        if snapshot.staleness:
            work_s = projection.work.reshape(2, -1).max(axis=0)
            return _Outcome(work_s, work_s - work_s[0], look_s, slots, is_step=False)
        finish_s = projection.finish_s.reshape(2, -1).min(axis=0)
        return _Outcome(finish_s, (finish_s[0] - finish_s) * slots, look_s, slots, is_step=True)


def _starved(snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> Role | None:
    """The role that has work and no slot; of two the one with more work."""
    counts = donors.slot_counts(snapshot)
    starved = [role for role in INFERENCE_ROLES if roles[role].backlog.sequences >= 0.5 and not counts[role]]
    return max(starved, key=lambda role: roles[role].backlog.sequences, default=None)
