"""What is left to generate, as a planner sees it: not one number for each request, but how long each will go on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

MAX_VALUES = 256
"""Lengths that a backlog keeps: more are thinned out, evenly over the sorted ones."""


def _nothing() -> Vector:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Backlog:
    """Requests of one inference role that are not answered, and those that are to be expected.

    Built where lengths are predicted (``core.lengths``); a snapshot carries one for each role.
    """

    remaining_tokens: Vector = field(default_factory=_nothing)
    """Tokens still to generate, ascending; each value stands for ``weight`` sequences. Running and waiting ones."""
    weight: float = 1.0
    new_tokens: Vector = field(default_factory=_nothing)
    """Quantiles of the length of a request that has not come yet, ascending, each equally likely."""
    new_prompt_tokens: float = 0.0
    """Prompt tokens that such a request brings."""

    @property
    def sequences(self) -> float:
        return len(self.remaining_tokens) * self.weight

    @property
    def tokens(self) -> float:
        return float(self.remaining_tokens.sum()) * self.weight

    @property
    def new_mean_tokens(self) -> float:
        return float(self.new_tokens.mean()) if len(self.new_tokens) else 0.0

    @classmethod
    def of(cls, remaining: Vector, new_tokens: Vector, new_prompt_tokens: float) -> Backlog:
        """From quantiles [sequences, levels] of the tokens each sequence has left, levels evenly spread."""
        values = np.sort(remaining, axis=None)
        weight = len(remaining) / max(1, len(values))
        if len(values) > MAX_VALUES:
            thinned = values[((np.arange(MAX_VALUES) + 0.5) * len(values) / MAX_VALUES).astype(int)]
            values, weight = thinned, len(remaining) / MAX_VALUES
        return cls(values, weight, np.sort(new_tokens), new_prompt_tokens)
