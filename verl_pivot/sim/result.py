"""What a simulated run came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from verl_pivot.core.bound import bound_s
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.sim.deployments import Deployment, Split, lay_out
from verl_pivot.sim.ledger import Ledger
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.simulation import Simulation


@dataclass(frozen=True)
class SimResult:
    """Figures of the steps after warm-up."""

    deployment: Deployment
    split: Split
    staleness: int
    """Of this deployment: colocated ones have none."""
    tokens_per_s: float
    """Response tokens trained on, by all slots together."""
    step_s: float
    """Mean."""
    steps_s: tuple[float, ...]
    bound_s: float
    """What a step takes at least, at the staleness of the scenario."""
    shifts: int
    migrated: int
    """Sequences that shifts cut off."""
    preemptions: int
    ledger: Ledger

    @property
    def bound_fraction(self) -> float:
        return self.bound_s / self.step_s

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "deployment": str(self.deployment),
            "split": asdict(self.split),
            "steps_s": list(self.steps_s),
            "bound_fraction": self.bound_fraction,
            "simulated": True,
        }


def simulate(
    scenario: Scenario,
    deployment: Deployment,
    split: Split,
    *,
    steps: int = 6,
    warmup: int = 2,
    settings: PlannerSettings | None = None,
    **options: Any,
) -> SimResult:
    """Run ``deployment`` for ``steps`` steps; figures are of those after ``warmup``."""
    return measure(run(scenario, deployment, split, steps=steps, settings=settings, **options), warmup)


def run(
    scenario: Scenario,
    deployment: Deployment,
    split: Split,
    *,
    steps: int,
    settings: PlannerSettings | None = None,
    **options: Any,
) -> Simulation:
    """The finished simulation itself, for those who want its timeline."""
    simulation = Simulation(scenario, lay_out(deployment, split), steps=steps, settings=settings, **options)
    simulation.run()
    return simulation


def measure(simulation: Simulation, warmup: int) -> SimResult:
    """Raises ValueError when no step is left after ``warmup``."""
    marks, steps = simulation.marks, simulation.trainer.steps
    if not 0 <= warmup < len(steps):
        raise ValueError(f"warmup is {warmup}: it must be from 0 to {len(steps) - 1}, the steps less one")
    scenario, layout, draws = simulation.scenario, simulation.layout, simulation.draws
    numbers = range(warmup, len(steps))
    peaks = [scenario.peaks(draws.context_tokens(number)) for number in numbers]
    first, last = marks[warmup], marks[-1]
    spent_s = last.at_s - first.at_s
    bounds = [
        bound_s(draws.work(number, peak, scenario.staleness), peak, scenario.slots)
        for number, peak in zip(numbers, peaks, strict=True)
    ]
    counts = [last.engines[role].preemptions - first.engines[role].preemptions for role in last.engines]
    return SimResult(
        deployment=layout.deployment,
        split=layout.split,
        staleness=simulation.staleness,
        tokens_per_s=sum(step.response_tokens for step in steps[warmup:]) / spent_s,
        step_s=spent_s / (len(steps) - warmup),
        steps_s=tuple(b.at_s - a.at_s for a, b in zip(marks[warmup:], marks[warmup + 1 :], strict=False)),
        bound_s=sum(bounds) / len(bounds),
        shifts=sum(first.at_s <= shift.start_s for shift in simulation.slots.shifts),
        migrated=sum(shift.evicted for shift in simulation.slots.shifts if first.at_s <= shift.start_s),
        preemptions=sum(counts),
        ledger=Ledger.between(first, last, scenario.slots, layout.train_slots, peaks[len(peaks) // 2]),
    )
