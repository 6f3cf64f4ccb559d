"""From step samples to figures: throughput, busy shares, the work-conserving bound, ratios. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np

BOUND_DEFINITION = (
    "bound_s: CPU seconds used by all compute processes (training workers, rollout and judge engines) in the timed "
    "steps, divided by slots x share. That is the least wall time in which the slots could have done this run's own "
    "work if none had ever idled. bound_fraction is bound_s over the wall time of the timed steps; 1 means that every "
    "slot was busy all the time. The work itself (CPU seconds per 1,000 response tokens) differs between deployments: "
    "larger decode batches need less."
)


@dataclass(frozen=True)
class StepSample:
    """One training step as seen from outside."""

    step: int
    step_s: float
    """The trainer's own timing of the step (``timing_s/step``)."""
    wall_s: float
    """Between the ends of the step before and of this one: also what the trainer does between its steps."""
    response_tokens: int
    slot_cpu_s: tuple[float, ...]
    """CPU seconds that the compute processes of each slot used in ``wall_s``."""
    outside_cpu_s: float = 0.0
    """CPU seconds that the machine spent on anything else: front ends, reward workers, Ray, the trainer's driver."""
    machine_speed: float = 1.0
    """How fast the machine was meanwhile (``probe.SpeedProbe``); its neighbours on the host slow it down at times."""
    role_cpu_s: dict[str, float] = field(default_factory=dict)
    """``slot_cpu_s`` by role, where the role of each process is known."""
    timing_s: dict[str, float] = field(default_factory=dict)
    """The trainer's other timings (``gen``, ``reward``, ``update_actor``, ...)."""
    staleness_mean: float | None = None
    """Versions between the newest weights a response was made with and those trained."""
    staleness_max: float | None = None


def summarize(steps: Sequence[StepSample], n_slots: int, share: float) -> dict[str, Any]:
    """Figures of one deployment over its timed steps. Raises ValueError without steps."""
    if not steps:
        raise ValueError("no timed steps to summarize")
    wall_s = sum(step.wall_s for step in steps)
    tokens = sum(step.response_tokens for step in steps)
    slot_cpu_s = [sum(step.slot_cpu_s[slot] for step in steps) for slot in range(n_slots)]
    bound_s = sum(slot_cpu_s) / (n_slots * share)
    known = [step.staleness_mean for step in steps if step.staleness_mean is not None]
    worst = [step.staleness_max for step in steps if step.staleness_max is not None]
    return {
        "steps": len(steps),
        "step_s": spread([step.step_s for step in steps]),
        "wall_s": wall_s,
        "response_tokens": tokens,
        "response_tokens_per_s": tokens / wall_s,
        "equal_speed_tokens_per_s": tokens / sum(step.wall_s * step.machine_speed for step in steps),
        "slot_busy_share": [cpu_s / (share * wall_s) for cpu_s in slot_cpu_s],
        "role_busy_slots": {
            role: cpu_s / (share * wall_s) for role, cpu_s in _totals([step.role_cpu_s for step in steps]).items()
        },
        "cpu_s_per_1000_tokens": 1000 * sum(slot_cpu_s) / tokens if tokens else None,
        "machine_speed": sum(step.machine_speed * step.wall_s for step in steps) / wall_s,
        "outside_cores": sum(step.outside_cpu_s for step in steps) / wall_s,
        "bound_s": bound_s,
        "bound_fraction": bound_s / wall_s,
        "timing_s_mean": {key: value / len(steps) for key, value in _totals([s.timing_s for s in steps]).items()},
        "staleness_mean": fmean(known) if known else None,
        "staleness_max": max(worst, default=None),
        "by_step": [asdict(step) for step in steps],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": fmean(values),
        "min": min(values),
        "max": max(values),
        "stdev": stdev(values) if len(values) > 1 else 0.0,
    }


def ratio(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], draws: int = 4000, seed: int = 0
) -> dict[str, float]:
    """How many times as fast ``ours`` is: tokens per second over tokens per second.

    Args:
        ours, theirs: (response tokens, wall seconds) of each timed step.

    Returns:
        ``ratio``; ``low`` and ``high``, the 2.5th and 97.5th percentile when steps are drawn again with replacement.
        With a handful of steps this understates what a repetition of the whole run may give.
    """
    rng = np.random.default_rng(seed)

    def rates(steps: Sequence[tuple[float, float]]) -> np.ndarray:
        values = np.asarray(steps, dtype=float)
        drawn = values[rng.integers(0, len(values), size=(draws, len(values)))].sum(axis=1)
        return drawn[:, 0] / drawn[:, 1]

    low, high = np.percentile(rates(ours) / rates(theirs), [2.5, 97.5])
    return {"ratio": _rate(ours) / _rate(theirs), "low": float(low), "high": float(high)}


def at_equal_speed(deployment: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(response tokens, seconds) of each timed step, the seconds as if the machine had always had speed 1."""
    return [(step["response_tokens"], step["wall_s"] * step["machine_speed"]) for step in deployment["by_step"]]


def compare(deployments: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Ratios of each resource_shift deployment to each of verl's, and of the look-ahead planner to the harmonic rule
    on the same split: ``"ours / theirs"`` -> ratio at equal machine speed, with the ratio ``as_measured`` beside it."""
    ratios = {}
    for ours in deployments:
        if not ours.startswith("resource_shift"):
            continue
        for theirs in deployments:
            if theirs.startswith("verl_") or (theirs != ours and theirs == ours.replace("_lookahead", "")):
                both = deployments[ours], deployments[theirs]
                rates = [deployment["response_tokens_per_s"] for deployment in both]
                equal = ratio(at_equal_speed(both[0]), at_equal_speed(both[1]))
                ratios[f"{ours} / {theirs}"] = {**equal, "as_measured": rates[0] / rates[1]}
    return ratios


def _rate(steps: Sequence[tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in steps) / sum(wall_s for _, wall_s in steps)


def _totals(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            totals[key] = totals.get(key, 0.0) + value
    return totals
