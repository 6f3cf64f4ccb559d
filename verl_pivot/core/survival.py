"""A survival curve learned from observations of which some have not ended yet.

Used by ``core.lengths`` for the shape of what is left after the mean and the prompt are explained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import CensoredData, ecdf

Vector = NDArray[np.float64]

TAIL_SHARE = 0.1
"""Of the observations: the longest, which the curve describes by their mean excess, since single points say little
about how far it goes on. For logarithms of lengths that is a Pareto tail of the lengths."""


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """Cumulative hazard, linear between ``knots`` and beyond the last of them with the slope ``1 / tail_scale``."""

    knots: Vector
    """Sorted values [k]."""
    hazards: Vector
    """Cumulative hazard at the knots [k], from 0; rises strictly."""
    tail_scale: float
    """Mean excess beyond the last knot."""

    @classmethod
    def fit(cls, ended: Vector, running: Vector) -> SurvivalCurve:
        """The Kaplan-Meier estimate (scipy) with an exponential tail.

        Args:
            ended: observed values [n], at least two of them different.
            running: values [m] that observations have reached without ending.
        """
        # A running observation that is shorter than every ended one bears on no step of the curve.
        sample = CensoredData.right_censored(
            np.concatenate([ended, running]), np.concatenate([np.zeros(len(ended), bool), np.ones(len(running), bool)])
        )
        curve = ecdf(sample).sf
        values, survival = curve.quantiles, curve.probabilities
        cut = max(1, int(np.searchsorted(-survival, -TAIL_SHARE)))
        knots = np.concatenate([[values[0] - _first_gap(values)], values[:cut]])
        kept = np.maximum(survival[:cut], TAIL_SHARE / 2)
        hazards = -np.log(np.minimum.accumulate(np.concatenate([[1.0], kept])))
        hazards = hazards + 1e-9 * np.arange(len(hazards))  # strictly rising, so that it can be inverted
        last = knots[-1]
        excess = float(np.sum(ended[ended > last] - last) + np.sum(running[running > last] - last))
        ends = int(np.sum(ended > last))
        spread = float(np.std(ended))
        # Two ends' worth of a tail as wide as the spread: a handful of points must not promise that it stops.
        tail_scale = (excess + 2 * 0.4 * spread) / (ends + 2)
        return cls(knots, hazards, max(tail_scale, 1e-6))

    def hazard(self, values: Vector) -> Vector:
        """Cumulative hazard at ``values``; 0 before the first knot."""
        beyond = np.maximum(values - self.knots[-1], 0.0) / self.tail_scale
        return np.asarray(np.interp(values, self.knots, self.hazards) + beyond)

    def inverse(self, hazards: Vector) -> Vector:
        """The value at which the cumulative hazard reaches ``hazards``."""
        beyond = np.maximum(hazards - self.hazards[-1], 0.0) * self.tail_scale
        return np.asarray(np.interp(hazards, self.hazards, self.knots) + beyond)

    def quantiles_beyond(self, reached: Vector, levels: Vector) -> Vector:
        """Quantiles [n, q] at ``levels`` ([q], or [n, q]) of the final value, given that ``reached`` [n] has been
        passed."""
        at_least = self.hazard(reached)[:, None] - np.log1p(-np.atleast_2d(levels))
        return np.maximum(self.inverse(at_least), reached[:, None])


def _first_gap(values: Vector) -> float:
    """How far before its first event the curve begins to fall."""
    return max(1e-6, float(np.median(np.diff(values)))) if len(values) > 1 else 1e-3
