"""Sequences within a projection: responses end and are judged, the last member of a group makes it ready.

Belongs to ``core.fluid``, which says how fast they advance. All sequences of a role gain tokens at the same rate, so a
sequence ends when its role's progress passes its own mark; marks and progress differ by candidate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog, GroupBacklog, Mask, Vector

Places = NDArray[np.intp]

_COHORTS = 4
"""Versions in one projection that may let new prompts in."""
_LEAST = 1e-9
"""Sequences; less is rounding."""


class SequenceFlow:
    """All arrays are [candidates] or [candidates, columns]. Columns are what is known at first, sorted by what it has
    left in rollout (responses, judgements, and the members that groups wait for, which have no weight of their own);
    after them come the responses of each cohort, which begin with a new version."""

    def __init__(
        self, rollout: Backlog, genrm: Backlog, groups: GroupBacklog, arrivals: float, candidates: int
    ) -> None:
        """``arrivals``: responses that a new version lets in."""
        self._new = rollout.new_tokens if arrivals else np.empty(0)
        self._cohort = arrivals if len(self._new) else 0.0
        self._lay_out(rollout, genrm, groups)
        known, first = len(self._respond), int(np.searchsorted(self._respond, 0.0))
        self._ends = np.full((candidates, len(self._judge)), np.inf)
        """Progress of genrm at which each is judged; infinite while it is not there."""
        self._ends[:, :first] = self._judge[:first]
        self._arrived = np.zeros((candidates, 1 + _COHORTS), dtype=int)
        """Columns that are through with rollout: of those known at first, and of each cohort."""
        self._arrived[:, 0] = first
        self._began = np.full((candidates, _COHORTS), np.inf)
        """Progress of rollout at which each cohort came; infinite before."""
        self.rollout_progress, self.genrm_progress = np.zeros(candidates), np.zeros(candidates)
        weight = self._counted[:known, 0]
        self._responding = np.full(candidates, weight[first:].sum())
        self._come = np.full(candidates, weight[:first].sum())
        """Sequences that have come to genrm, judged ones among them."""
        self._count_over()

    def _lay_out(self, rollout: Backlog, genrm: Backlog, groups: GroupBacklog) -> None:
        """What each column is, the same for all candidates."""
        count, judging, grouped = len(rollout.remaining_tokens), len(genrm.remaining_tokens), len(groups.rollout_tokens)
        coming = _COHORTS * len(self._new)
        respond = np.concatenate([rollout.remaining_tokens, np.full(judging, -1.0), groups.rollout_tokens])
        order = np.argsort(respond, kind="stable")
        self._respond = respond[order]
        """Tokens that each of those known at first has left in rollout; negative: it is being judged."""
        judge = np.concatenate([_shuffled(genrm.new_tokens, count), genrm.remaining_tokens, groups.genrm_tokens])
        self._judge = np.concatenate([judge[order], _shuffled(genrm.new_tokens, coming)])
        self._counted = np.zeros((len(respond) + coming, 3))
        """What a column counts for: sequences, groups, groups that are due."""
        self._counted[: len(order), 0] = np.repeat([rollout.weight, genrm.weight, 0.0], [count, judging, grouped])[
            order
        ]
        self._counted[len(order) :, 0] = self._cohort / max(1, len(self._new))
        self._counted[: len(order), 1] = groups.weight * (order >= count + judging)
        self._counted[: len(order), 2] = np.concatenate([np.zeros(count + judging), groups.due])[order]

    def responding(self) -> Vector:
        """Sequences in rollout."""
        return np.where(self._responding > _LEAST, self._responding, 0.0)

    def judging(self) -> Vector:
        """Sequences in genrm."""
        left = self._come - self._over[:, 0]
        return np.where(left > _LEAST, left, 0.0)

    def ready(self) -> Vector:
        """Groups that have become ready since the projection began."""
        return np.asarray(self._over[:, 1])

    def responses_over(self) -> Mask:
        """Nothing known at first is left in rollout, and no group waits for it."""
        return np.asarray(self._arrived[:, 0] == len(self._respond))

    def groups_left(self) -> Mask:
        """Some of the groups known at first are not ready."""
        return np.asarray(self._over[:, 1] < self._counted[:, 1].sum() - 1e-6)

    def due_are_ready(self) -> Mask:
        """No group that is due is missing."""
        return np.asarray(self._over[:, 2] > self._counted[:, 2].sum() - 0.5)

    def advance(self, rollout_tokens: Vector, genrm_tokens: Vector) -> Vector:
        """Every response gains ``rollout_tokens`` and every judgement ``genrm_tokens``; returns how many responses
        end, all with weight."""
        began, judged = self.rollout_progress, self.genrm_progress
        self.rollout_progress, self.genrm_progress = began + rollout_tokens, judged + genrm_tokens
        row, column, ends = self._arrivals()
        ended = np.zeros(len(began))
        if len(row):
            # It is judged for the rest of the time step only.
            share = np.clip((ends - began[row]) / np.maximum(rollout_tokens[row], 1e-9), 0.0, 1.0)
            self._ends[row, column] = judged[row] + share * genrm_tokens[row] + self._judge[column]
            ended[:] = np.bincount(row, self._counted[column, 0], minlength=len(began))
            self._responding, self._come = self._responding - ended, self._come + ended
        self._count_over()
        return ended

    def _arrivals(self) -> tuple[Places, Places, Vector]:
        """Candidate and column of what is through with rollout by now, and was not before; and at which progress."""
        size, known = len(self._new), len(self._respond)
        to = np.zeros_like(self._arrived)
        to[:, 0] = np.searchsorted(self._respond, self.rollout_progress, side="right")
        if size:
            to[:, 1:] = np.searchsorted(self._new, self.rollout_progress[:, None] - self._began, side="right")
        counts, first = (to - self._arrived).ravel(), self._arrived.ravel()
        self._arrived = to
        part = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(part)) + (first - np.cumsum(counts) + counts)[part]
        row, cohort = np.divmod(part, 1 + _COHORTS)
        column = np.where(cohort > 0, known + (cohort - 1) * size + within, within)
        ends = np.empty(len(part))
        new = cohort > 0
        ends[~new] = self._respond[within[~new]]
        ends[new] = self._began[row[new], cohort[new] - 1] + self._new[within[new]]
        return row, column, ends

    def _count_over(self) -> None:
        """By now are judged: sequences, groups, groups that are due [candidates, 3]."""
        self._over = (self._ends <= self.genrm_progress[:, None]).astype(np.float64) @ self._counted

    def let_in(self, where: Mask) -> None:
        """New prompts come."""
        cohort = np.isfinite(self._began).sum(axis=1)
        rows = np.flatnonzero(where & (cohort < _COHORTS))
        if self._cohort and len(rows):
            self._began[rows, cohort[rows]] = self.rollout_progress[rows]
            self._responding[rows] += self._cohort

    def last_share(self, genrm_tokens: Vector) -> Vector:
        """Of the time step that has just passed, the part after which the last sequence had ended."""
        ends = np.where(np.isfinite(self._ends), self._ends, -np.inf).max(axis=1, initial=0.0)
        before = self.genrm_progress - genrm_tokens
        return np.asarray(np.clip((ends - before) / np.maximum(genrm_tokens, 1e-9), 0.0, 1.0))

    def tokens_left(self) -> tuple[Vector, Vector]:
        """Tokens of rollout, and of genrm, that are still to generate."""
        known = np.broadcast_to(self._respond, (len(self._began), len(self._respond)))
        coming = (self._began[:, :, None] + self._new).reshape(len(known), -1)
        respond = np.concatenate([known, coming], axis=1)
        begun = np.isfinite(respond)
        rollout = np.where(begun, respond - self.rollout_progress[:, None], 0.0)
        genrm = np.where(np.isfinite(self._ends), self._ends - self.genrm_progress[:, None], self._judge) * begun
        weight = self._counted[:, 0]
        return np.asarray(np.maximum(rollout, 0.0) @ weight), np.asarray(np.maximum(genrm, 0.0) @ weight)


def _shuffled(values: Vector, count: int) -> Vector:
    """``count`` of ``values``, each about as often, in an order that goes with nothing else."""
    if not len(values):
        return np.zeros(count)
    return np.asarray(values[(np.modf(np.arange(1, count + 1) * _GOLDEN)[0] * len(values)).astype(int)])


_GOLDEN = 0.6180339887498949
