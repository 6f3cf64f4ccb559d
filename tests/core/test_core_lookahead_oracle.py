"""The planner's choice against every other in small worlds where all can be tried out."""

from __future__ import annotations

import numpy as np
from oracle import World, draw

from verl_pivot.core.lookahead import LookaheadPlanner
from verl_pivot.core.options import Option, options_of
from verl_pivot.core.plan import Plan
from verl_pivot.core.settings import PlannerSettings

CASES = 200
SETTINGS = PlannerSettings(name="lookahead", margin=0.0, window_s=10.0, cooldown_s=0.0, immunity_s=0.0)


def regret(seed: int) -> float:
    """Finish of the planner's choice over the best one's."""
    case = draw(seed)
    view = World(case.copy()).view()
    plan = LookaheadPlanner(SETTINGS).plan(view)
    targets = {shift.slot_id: shift.target for shift in plan.shifts}
    chosen = Option(tuple((slot, targets[slot.slot_id]) for slot in view.slots if slot.slot_id in targets))
    options = options_of(view, SETTINGS, Plan((), ""))
    finishes = [World(case.copy()).finish_s(option) for option in options]
    return World(case.copy()).finish_s(chosen) / min(finishes)


def test_choices_are_near_the_best() -> None:
    regrets = np.array([regret(seed) for seed in range(CASES)])
    assert (regrets <= 1.02).mean() >= 0.8, np.quantile(regrets, [0.5, 0.8, 0.9, 0.95, 1.0])
    assert np.quantile(regrets, 0.95) <= 1.2
