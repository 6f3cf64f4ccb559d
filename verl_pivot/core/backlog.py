"""What is left to generate, as a planner sees it: not one number for each request, but how long each will go on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

MAX_VALUES = 256
"""Lengths that a backlog keeps: more are thinned out, evenly over the sorted ones."""
MAX_GROUPS = 256
"""Groups that are followed one by one."""


def _nothing() -> Vector:
    return np.empty(0)


def _nobody() -> Mask:
    return np.empty(0, dtype=bool)


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
    unread_tokens: float = 0.0
    """Prompt tokens of requests that have no token yet: most of them are still to be prefilled."""

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
    def of(cls, remaining: Vector, new_tokens: Vector, new_prompt_tokens: float, unread_tokens: float = 0.0) -> Backlog:
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
        return cls(values, weight, np.sort(new_tokens), new_prompt_tokens, unread_tokens)


@dataclass(frozen=True, eq=False)
class GroupBacklog:
    """Groups under way, by the member of each that is expected to end last: training waits for it. One value for each
    group in all arrays; a value stands for ``weight`` groups."""

    rollout_tokens: Vector = field(default_factory=_nothing)
    """That its response has left; negative when it is being judged."""
    genrm_tokens: Vector = field(default_factory=_nothing)
    """That its judgement has left, or will have."""
    due: Mask = field(default_factory=_nobody)
    """No later step may train on it."""
    weight: float = 1.0

    @property
    def groups(self) -> float:
        return len(self.rollout_tokens) * self.weight

    @classmethod
    def of(cls, rollout_tokens: Vector, genrm_tokens: Vector, due: Mask) -> GroupBacklog:
        """Thinned out evenly where there are too many, by how far they have to go."""
        count = len(rollout_tokens)
        if count <= MAX_GROUPS:
            return cls(rollout_tokens, genrm_tokens, due)
        order = np.argsort(np.maximum(rollout_tokens, 0.0) + genrm_tokens, kind="stable")
        kept = order[((np.arange(MAX_GROUPS) + 0.5) * count / MAX_GROUPS).astype(int)]
        kept[-1] = order[-1]
        return cls(rollout_tokens[kept], genrm_tokens[kept], due[kept], count / MAX_GROUPS)
