"""Sequences within a projection: responses end and are judged, the last member of a group makes it ready.

Belongs to ``core.fluid``, which says how fast they advance. All sequences of a role gain tokens at the same rate, so a
sequence ends when its role's progress passes its own mark; marks and progress differ by candidate.
"""

from __future__ import annotations

import numpy as np

from verl_pivot.core.backlog import Backlog, GroupBacklog, Mask, Vector

_COHORTS = 4
"""Versions in one projection that may let new prompts in."""


class SequenceFlow:
    """All arrays are [candidates] or [candidates, columns]. Columns are responses, judgements, responses that are still
    to come, and the members that groups wait for; the latter have no weight of their own."""

    def __init__(
        self, rollout: Backlog, genrm: Backlog, groups: GroupBacklog, arrivals: float, candidates: int
    ) -> None:
        """``arrivals``: responses that a new version lets in."""
        count, judging, new = len(rollout.remaining_tokens), len(genrm.remaining_tokens), len(rollout.new_tokens)
        self._new = np.tile(rollout.new_tokens, _COHORTS)
        coming = len(self._new) if arrivals else 0
        respond = np.concatenate(
            [
                rollout.remaining_tokens,
                np.full(judging, -1.0),
                np.full(coming, np.inf),
                groups.rollout_tokens,
            ]
        )
        self._judge = np.concatenate(
            [
                _shuffled(genrm.new_tokens, count),
                genrm.remaining_tokens,
                _shuffled(genrm.new_tokens, coming),
                groups.genrm_tokens,
            ]
        )
        self._weight = np.concatenate(
            [
                np.full(count, rollout.weight),
                np.full(judging, genrm.weight),
                np.full(coming, arrivals / max(1, new)),
                np.zeros(len(groups.rollout_tokens)),
            ]
        )
        self._coming = slice(count + judging, count + judging + coming)
        self._grouped = slice(count + judging + coming, len(respond))
        self._group_weight, self._due = groups.weight, np.flatnonzero(groups.due) + self._grouped.start
        self._respond = np.tile(respond, (candidates, 1))
        self._ends = np.where(self._respond < 0, self._judge, np.inf)
        """Progress of genrm at which each is judged; infinite while it is not there."""
        self._let_in = np.zeros(candidates, dtype=int)
        self.rollout_progress, self.genrm_progress = np.zeros(candidates), np.zeros(candidates)

    def responding(self) -> Vector:
        """Sequences in rollout."""
        return np.asarray((self._respond > self.rollout_progress[:, None]) * np.isfinite(self._respond) @ self._weight)

    def judging(self) -> Vector:
        """Sequences in genrm."""
        return np.asarray((self._ends > self.genrm_progress[:, None]) * np.isfinite(self._ends) @ self._weight)

    def ready(self) -> Vector:
        """Groups that have become ready since the projection began."""
        ended = self._ends[:, self._grouped] <= self.genrm_progress[:, None]
        return np.asarray(ended.sum(axis=1) * self._group_weight)

    def due_are_ready(self) -> Mask:
        """No group that is due is missing."""
        return np.asarray((self._ends[:, self._due] <= self.genrm_progress[:, None]).all(axis=1))

    def advance(self, rollout_tokens: Vector, genrm_tokens: Vector) -> Vector:
        """Every response gains ``rollout_tokens`` and every judgement ``genrm_tokens``; returns how many responses
        end, all with weight."""
        began, judged = self.rollout_progress, self.genrm_progress
        self.rollout_progress, self.genrm_progress = began + rollout_tokens, judged + genrm_tokens
        arrived = (self._respond <= self.rollout_progress[:, None]) & np.isinf(self._ends)
        row, column = np.nonzero(arrived)
        if not len(row):
            return np.zeros(len(began))
        # It is judged for the rest of the time step only.
        share = np.clip((self._respond[row, column] - began[row]) / np.maximum(rollout_tokens[row], 1e-9), 0.0, 1.0)
        self._ends[row, column] = judged[row] + share * genrm_tokens[row] + self._judge[column]
        return np.asarray(np.bincount(row, self._weight[column], minlength=len(began)), dtype=np.float64)

    def let_in(self, where: Mask) -> None:
        """New prompts come."""
        size = (self._coming.stop - self._coming.start) // _COHORTS
        if not size:
            return
        for row in np.flatnonzero(where & (self._let_in < _COHORTS)):
            first = self._coming.start + self._let_in[row] * size
            self._respond[row, first : first + size] = self.rollout_progress[row] + self._new[:size]
            self._let_in[row] += 1

    def last_share(self, genrm_tokens: Vector) -> Vector:
        """Of the time step that has just passed, the part after which the last sequence had ended."""
        ends = np.where(np.isfinite(self._ends), self._ends, -np.inf).max(axis=1, initial=0.0)
        before = self.genrm_progress - genrm_tokens
        return np.asarray(np.clip((ends - before) / np.maximum(genrm_tokens, 1e-9), 0.0, 1.0))

    def tokens_left(self) -> tuple[Vector, Vector]:
        """Tokens of rollout, and of genrm, that are still to generate."""
        known = np.isfinite(self._respond)
        rollout = np.where(known, self._respond - self.rollout_progress[:, None], 0.0)
        genrm = np.where(np.isfinite(self._ends), self._ends - self.genrm_progress[:, None], self._judge) * known
        return np.asarray(np.maximum(rollout, 0.0) @ self._weight), np.asarray(np.maximum(genrm, 0.0) @ self._weight)


def _shuffled(values: Vector, count: int) -> Vector:
    """``count`` of ``values``, each about as often, in an order that goes with nothing else."""
    if not len(values):
        return np.zeros(count)
    return np.asarray(values[(np.modf(np.arange(1, count + 1) * _GOLDEN)[0] * len(values)).astype(int)])


_GOLDEN = 0.6180339887498949
