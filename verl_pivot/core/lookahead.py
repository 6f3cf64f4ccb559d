"""The planner that looks ahead: it plays the coming minutes through under many allocations and takes the best.

What counts is when all known work is done (staleness 0), or how much useful work gets done within the horizon (more
staleness: there is always a next step). Shifts pay for their dead time and for the prefill of what they cut off inside
the projection; what is left must beat a margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_pivot.core import donors
from verl_pivot.core.fluid import Fluid, Projection, RoleModel
from verl_pivot.core.foresight import horizon_s, role_models, slot_count, train_model
from verl_pivot.core.harmonic import HarmonicPlanner
from verl_pivot.core.lease import plan_training
from verl_pivot.core.options import Option, candidates_of, options_of
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role, SlotStatus, SlotView, Snapshot
from verl_pivot.core.training_flow import Vector

STEPS = 36
"""Time steps of a projection, the first ones shorter than the last."""
MARGIN = 0.6
"""Of the margin that users set for throughput within a window: what is gained here lasts for the whole horizon."""
MOVE_S = 0.1
"""Slot-seconds by which an option must be better for each slot it moves more than another."""
MOST_DEFERRED_S = 120.0
"""Longest that training waits for its slots although a batch is ready."""


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What was projected for a list of options; the first is the present allocation."""

    projection: Projection
    gains: Vector
    """Slot-seconds over the present allocation [options]."""
    horizon_s: float
    slots: int
    is_step: bool
    """Counted is when all work is done, else how much is within the horizon."""

    def words(self, option: int) -> str:
        if self.is_step:
            return f"all work done in {self.projection.finish_s[option]:.0f} s"
        return f"{self.projection.work[option] / (self.horizon_s * self.slots):.0%} of slot-time of use"

    def threshold_s(self, margin: float) -> float:
        return MARGIN * margin * self.horizon_s * self.slots


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
        roles = role_models(snapshot)
        if roles is None:
            return training if training.shifts else self._harmonic.plan(snapshot)
        starved = _starved(snapshot, roles)
        waits = "" if not training.shifts or starved else self._why_training_waits(snapshot, roles)
        if training.shifts and not waits:
            return training
        held = self._why_held(snapshot, roles, starved)
        if held:
            return Plan((), f"no shift, because {waits or held}")
        suggested = Plan((), "") if waits else self._harmonic.plan(snapshot)
        options = options_of(snapshot, self.settings, suggested, defers=bool(waits))
        if len(options) == 1:
            return Plan((), f"no shift, because {waits or 'no slot may change role now'}")
        return self._choose(snapshot, roles, options, starved)

    def _why_training_waits(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> str:
        """Why training is better served once all its batches are ready; empty when it gets its lent slots now."""
        train = snapshot.train
        working = any(model.backlog.sequences >= 1 for model in roles.values())
        if train.batches_to_publish < 2 or not working or train.wanted_s > MOST_DEFERRED_S:
            return ""
        outcome = self._project(snapshot, roles, [Option(lends=True), Option(lends=True, defers=True)])
        if outcome.gains[1] < outcome.threshold_s(self.settings.margin):
            return ""
        ready = donors.counted(train.groups_ready, "group")
        return f"training waits for all its batches: {ready} ready, {outcome.words(0)}, waiting {outcome.words(1)}"

    def _why_held(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], starved: Role | None) -> str:
        """Why nothing may shift now; empty when something may."""
        if all(model.backlog.sequences < 0.5 for model in roles.values()):
            return "no work besides training"
        if starved is not None:
            return ""
        shifting = sum(slot.status is SlotStatus.SHIFTING for slot in snapshot.slots)
        if shifting:
            return f"{donors.counted(shifting, 'slot')} still shifting"
        if snapshot.last_shift_s is None:
            return ""
        left_s = snapshot.last_shift_s + self.settings.cooldown_s - snapshot.now_s
        return f"cooldown {left_s:.1f} s left" if left_s > 0 else ""

    def _choose(
        self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], options: list[Option], starved: Role | None
    ) -> Plan:
        """The best option; for a role that has work and no slot the best that feeds it, whatever it costs."""
        outcome = self._project(snapshot, roles, options)
        effort_s = MOVE_S * np.array([len(option.moving) for option in options])
        worth = outcome.gains - effort_s
        feeds = np.array([bool(option.moving) and option.target is starved for option in options])
        best = int(np.argmax(np.where(feeds, worth, -np.inf) if feeds.any() else worth))
        gain, option = float(outcome.gains[best]), options[best]
        if not option.moving or (gain <= effort_s[best] and not feeds.any()):
            return Plan((), f"no shift, because nothing is better than the present roles: {outcome.words(0)}")
        where = f"{donors.counted(len(option.moving), 'slot')} to {option.target}"
        what = f"{where}: {outcome.words(0)}, then {outcome.words(best)}, in the next {outcome.horizon_s:.0f} s"
        threshold_s = outcome.threshold_s(self.settings.margin)
        if gain < threshold_s and not feeds.any():
            why = f"gain {gain:.0f} slot-seconds under margin {threshold_s:.0f}"
            return Plan((), f"no shift, because {why} for {what}")
        share = gain / len(option.moving)
        shifts = (
            Shift(slot.slot_id, slot.role, option.target, share, _cost_s(snapshot, slot, option.target), what)
            for slot in option.moving
        )
        return Plan(tuple(shifts), what)

    def _project(self, snapshot: Snapshot, roles: Mapping[Role, RoleModel], options: list[Option]) -> _Outcome:
        train = train_model(snapshot)
        look_s = horizon_s(snapshot, roles, train, self.settings.window_s)
        shift_s = snapshot.shift_costs.seconds(Role.ROLLOUT, Role.GENRM)
        patience_s = self.settings.cooldown_s + shift_s
        steps_s = np.linspace(0.4, 1.6, STEPS) * look_s / STEPS
        projection = Fluid(roles, train, candidates_of(snapshot, options), patience_s, shift_s).project(steps_s)
        slots, is_step = slot_count(snapshot), snapshot.staleness == 0
        gains = projection.work - projection.work[0]
        if is_step:
            gains = (projection.finish_s[0] - projection.finish_s) * slots
        return _Outcome(projection, np.asarray(gains), look_s, slots, is_step)


def _starved(snapshot: Snapshot, roles: Mapping[Role, RoleModel]) -> Role | None:
    """The role that has work and no slot; of two the one with more work."""
    counts = donors.slot_counts(snapshot)
    starved = [role for role in INFERENCE_ROLES if roles[role].backlog.sequences >= 0.5 and not counts[role]]
    return max(starved, key=lambda role: roles[role].backlog.sequences, default=None)


def _cost_s(snapshot: Snapshot, slot: SlotView, target: Role) -> float:
    """Slot-seconds that one shift costs: its dead time and the prefill of what it cuts off."""
    prefill_s = slot.load.context_tokens * snapshot.prefill_s_per_token.get(slot.role, 0.0)
    return snapshot.shift_costs.seconds(slot.role, target) + prefill_s
