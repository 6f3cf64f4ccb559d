"""How much longer than usual a prompt's responses are: what its siblings say, ended or still running.

The model of logarithmic lengths behind ``core.lengths``: ``log(tokens) = level + prompt effect + residual``, with
normal effects and residuals for this purpose only; the shape of the residuals is learned apart (``core.survival``).
A sibling that still runs is a censored observation: it says "longer than this".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Vector = NDArray[np.float64]
Index = NDArray[np.int64]

_NEWTON_STEPS = 5


@dataclass(frozen=True)
class Spread:
    """Standard deviations of logarithmic lengths."""

    effect: float
    """Between prompts."""
    residual: float
    """Between responses of one prompt."""

    @property
    def correlation(self) -> float:
        """Within-prompt correlation of logarithmic lengths."""
        return self.effect**2 / (self.effect**2 + self.residual**2)


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of ``groups`` groups, apart from siblings that still run."""

    prior_mean: Vector
    """Expected effect [groups]: 0, or what an earlier epoch showed."""
    prior_variance: Vector
    ended_sum: Vector
    """Sum over ended siblings of (log length - level) [groups]."""
    ended_count: Vector


@dataclass(frozen=True, eq=False)
class Expected:
    """The log length that each running sequence is expected to reach, its own progress left out of account."""

    mean: Vector
    deviation: Vector


def leave_one_out(evidence: Evidence, group: Index, reached: Vector, level: float, spread: Spread) -> Expected:
    """Expected log length of running sequences.

    Args:
        group: row in ``evidence`` of each running sequence [n].
        reached: logarithm of the tokens each has so far [n].
        level: mean logarithm of lengths at present.

    The mode of a group's effect is found by Newton's method (the posterior is log-concave); a sequence's own
    contribution is taken out again to first order.
    """
    modes = _modes(evidence, group, reached - level, np.full(len(evidence.prior_mean), spread.residual))
    without = np.maximum(modes.curvature[group] - modes.bend, 1 / evidence.prior_variance[group])
    mean = modes.effect[group] - modes.slope / without
    return Expected(level + mean, np.sqrt(spread.residual**2 + 1 / without))


def by_siblings(evidence: Evidence, group: Index, beyond: Vector, residual: Vector) -> Expected:
    """Expected log length over ``level`` of one further sequence of each group [groups], by its siblings alone.

    Args:
        group: row in ``evidence`` of each running sibling [n].
        beyond: logarithm of the tokens that each running sibling has, over the level [n].
        residual: between responses of one prompt, when each group was looked at [groups].
    """
    modes = _modes(evidence, group, beyond, residual)
    return Expected(modes.effect, np.sqrt(residual**2 + 1 / modes.curvature))


@dataclass(frozen=True, eq=False)
class _Modes:
    effect: Vector
    """The likeliest effect of each group [groups]."""
    curvature: Vector
    """Precision of it [groups]."""
    slope: Vector
    """What each running sequence adds to the gradient [n], and to the curvature."""
    bend: Vector


def _modes(evidence: Evidence, group: Index, beyond: Vector, residual: Vector) -> _Modes:
    effect, square, own = evidence.prior_mean.copy(), residual**2, residual[group]
    slope, bend = np.zeros_like(beyond), np.zeros_like(beyond)
    for _ in range(_NEWTON_STEPS):
        z = (beyond - effect[group]) / own
        hazard = np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_ndtr(-z))
        slope, bend = hazard / own, np.maximum(hazard * (hazard - z), 1e-9) / own**2
        gradient = (evidence.prior_mean - effect) / evidence.prior_variance
        gradient += (evidence.ended_sum - evidence.ended_count * effect) / square
        gradient += np.bincount(group, slope, len(effect))
        curvature = 1 / evidence.prior_variance + evidence.ended_count / square
        curvature = curvature + np.bincount(group, bend, len(effect))
        effect = effect + np.clip(gradient / curvature, -2.0, 2.0)
    return _Modes(effect, curvature, slope, bend)


def for_new(evidence: Evidence, group: Index, level: float, spread: Spread) -> Expected:
    """Expected log length of sequences that have not begun, by ended siblings and earlier epochs alone."""
    precision = 1 / evidence.prior_variance + evidence.ended_count / spread.residual**2
    mean = evidence.prior_mean / evidence.prior_variance + evidence.ended_sum / spread.residual**2
    effect, variance = (mean / precision)[group], (1 / precision)[group]
    return Expected(level + effect, np.sqrt(spread.residual**2 + variance))


class SpreadEstimate:
    """Running estimate of ``Spread`` from complete groups, with an exponential memory of ``memory`` groups."""

    def __init__(self, assumed: Spread, memory: float = 256.0) -> None:
        self._memory = memory
        # The assumption weighs as much as a few groups, so that the first ones do not swing it.
        self._weight = 8.0
        self._within = self._weight * assumed.residual**2
        self._between = self._weight * assumed.effect**2
        self._spread = assumed

    def add_group(self, deviations: Vector) -> None:
        """``deviations``: (log length - level) of all responses [n >= 2] of one group that is complete."""
        count = len(deviations)
        if count < 2:
            return
        within = float(np.var(deviations, ddof=1))
        between = float(np.mean(deviations)) ** 2 - within / count  # can be negative; its mean is not
        keep = 1 - 1 / self._memory
        self._weight = keep * self._weight + 1
        self._within = keep * self._within + within
        self._between = keep * self._between + between
        self._update()

    def spread(self) -> Spread:
        return self._spread

    def _update(self) -> None:
        within = max(self._within / self._weight, 1e-4)
        between = max(self._between / self._weight, 0.02 * within)
        self._spread = Spread(math.sqrt(between), math.sqrt(within))

    def state(self) -> list[float]:
        return [self._weight, self._within, self._between]

    def load(self, state: list[float]) -> None:
        self._weight, self._within, self._between = (float(value) for value in state)
        self._update()
