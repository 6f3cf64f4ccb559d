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
        """From stratified values [sequences, draws] of the tokens that each sequence has left."""
        values = np.sort(remaining, axis=None)
        weight = len(remaining) / max(1, len(values))
        if len(values) > MAX_VALUES:
            edges = (np.arange(MAX_VALUES) * len(values) / MAX_VALUES).astype(int)
            means = np.add.reduceat(values, edges) / np.diff(np.append(edges, len(values)))
            # How long the longest runs is what a step waits for: keep it, and the sum.
            rest = means.sum() - values[-1]
            means = np.append(means[:-1] * rest / means[:-1].sum(), values[-1])
            values, weight = means, len(remaining) / MAX_VALUES
        return cls(values, weight, np.sort(new_tokens), new_prompt_tokens)


@dataclass(frozen=True, eq=False)
class GroupBacklog:
    """Groups under way, by what stands between them and training. A group is as slow as its slowest response."""

    rollout_tokens: Vector = field(default_factory=_nothing)
    """Ascending: tokens that the slowest open response of a group has left; one value for each such group."""
    genrm_tokens: Vector = field(default_factory=_nothing)
    """Ascending: the same for groups whose responses have all ended, of their judgements."""
    last_judgement_tokens: float = 0.0
    """Tokens of the judgement that a group waits for after its last response."""
    due_rollout_tokens: float = 0.0
    """Tokens that the slowest response has left among groups that no later step may train on; 0 without any."""
    due_genrm_tokens: float = 0.0
    """The same of judgements; 0 when none of those groups waits for judgements alone."""

    @property
    def groups(self) -> int:
        return len(self.rollout_tokens) + len(self.genrm_tokens)
