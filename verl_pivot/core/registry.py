"""Planners by the name that configuration gives them."""

from __future__ import annotations

from collections.abc import Callable

from verl_pivot.core.baselines import EnableSwitchPlanner, PhasesPlanner, TrainerPoolPlanner
from verl_pivot.core.harmonic import HarmonicPlanner
from verl_pivot.core.lookahead import LookaheadPlanner
from verl_pivot.core.plan import Planner
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.static import StaticPlanner

__all__ = ["PlannerSettings", "looks_at_lengths", "make_planner", "planner_names"]

_PLANNERS: dict[str, Callable[[PlannerSettings], Planner]] = {
    HarmonicPlanner.name: HarmonicPlanner,
    LookaheadPlanner.name: LookaheadPlanner,
    StaticPlanner.name: StaticPlanner,
    PhasesPlanner.name: PhasesPlanner,
    EnableSwitchPlanner.name: EnableSwitchPlanner,
    TrainerPoolPlanner.name: TrainerPoolPlanner,
}


def looks_at_lengths(name: str) -> bool:
    """Whether this planner makes use of what a snapshot predicts of lengths."""
    return name == LookaheadPlanner.name


def planner_names() -> tuple[str, ...]:
    """Every name that ``make_planner`` takes."""
    return tuple(sorted(_PLANNERS))


def make_planner(name: str, settings: PlannerSettings | None = None) -> Planner:
    """A new planner for one run. Called by the controller (control-plane process) and the simulator.

    Raises ValueError that lists the names when ``name`` is none of them.
    """
    if name not in _PLANNERS:
        raise ValueError(f"planner.name is {name!r}: it must be one of {', '.join(planner_names())}")
    return _PLANNERS[name](settings or PlannerSettings(name=name))
