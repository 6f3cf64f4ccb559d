"""Lengths that were observed, each with how surprising it was: what ``core.lengths`` learns level and shape from.

How surprising one was depends on what its siblings had shown when it ended. That is noted at once and computed later,
for many together: a run ends thousands of sequences between two looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl_pivot.core.prompt_effects import Evidence, by_siblings


class EndedLength(NamedTuple):
    """One observation."""

    birth: int
    """Number of the sequence in the order in which they began."""
    length: float
    """Logarithm of its tokens."""
    z: float
    """Over what its siblings had promised, in standard deviations."""
    cut: bool
    """Ended by the budget: it might have gone on."""


@dataclass(frozen=True)
class Siblings:
    """What was known of a sequence's group when it ended, itself left out."""

    prior: tuple[float, float]
    """Mean and variance of the group's effect."""
    ended: int
    ended_sum: float
    """Of their log lengths over ``level``."""
    running_tokens: Sequence[int]
    """That each of those still running has."""
    level: float
    residual: float
    """Deviation between responses of one prompt."""


class EndedLengths:
    """The latest ``window`` observations."""

    def __init__(self, window: int) -> None:
        self._ended: deque[EndedLength] = deque(maxlen=window)
        self._latest: list[tuple[int, float, bool, Siblings]] = []
        """Not yet in ``_ended``."""

    def __len__(self) -> int:
        return min(self._ended.maxlen or 0, len(self._ended) + len(self._latest))

    def add(self, birth: int, length: float, cut: bool, siblings: Siblings) -> None:
        """A sequence ended."""
        self._latest.append((birth, length, cut, siblings))

    def extend(self, known: Iterable[EndedLength]) -> None:
        """Observations of an earlier run."""
        self._ended.extend(known)

    def all(self) -> Sequence[EndedLength]:
        """Oldest first."""
        self._judge()
        return tuple(self._ended)

    def _judge(self) -> None:
        latest, self._latest = self._latest, []
        if not latest:
            return
        known = [siblings for _, _, _, siblings in latest]
        evidence = Evidence(
            np.array([siblings.prior[0] for siblings in known]),
            np.array([siblings.prior[1] for siblings in known]),
            np.array([siblings.ended_sum for siblings in known]),
            np.array([float(siblings.ended) for siblings in known]),
        )
        level = np.array([siblings.level for siblings in known])
        row = np.repeat(np.arange(len(known)), [len(siblings.running_tokens) for siblings in known])
        tokens = np.array([count for siblings in known for count in siblings.running_tokens], dtype=np.float64)
        beyond = np.log(np.maximum(tokens, 1.0)) - level[row]
        expected = by_siblings(evidence, row, beyond, np.array([siblings.residual for siblings in known]))
        z = (np.array([length for _, length, _, _ in latest]) - level - expected.mean) / expected.deviation
        for (birth, length, cut, _), surprise in zip(latest, z, strict=True):
            self._ended.append(EndedLength(birth, length, float(surprise), cut))
