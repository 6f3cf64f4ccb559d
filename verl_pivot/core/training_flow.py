"""Training within a projection: groups become ready as sequences end, batches begin when they are, weights come out.

Belongs to ``core.fluid``, which moves sequences; here are the groups they make. All arrays are [candidates].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import GroupBacklog

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

NEARLY = 0.5
"""Groups short of a batch that still count as one: the last of a fluid never quite arrives."""
_MOST_PARTS = 6


@dataclass(frozen=True)
class TrainModel:
    """Training as the projection sees it."""

    slots: int
    is_lent: bool
    """Its slots serve inference at present."""
    busy_s: float
    """Seconds that the present update, and what belongs to it, will go on."""
    update_s: float
    """Of one batch; above 0."""
    groups_ready: float
    groups_needed: float
    batches_to_publish: int
    """Until the version changes and new prompts come, the present one included."""
    batches_per_step: int
    arrivals: float
    """Sequences that come with a new version; 0 when none do."""
    to_train_s: float
    from_train_s: float
    groups: GroupBacklog = field(default_factory=GroupBacklog)
    every_batch_waits: bool = False
    """Each batch waits for the groups that are due, not the last one of a step alone."""


@dataclass(frozen=True, eq=False)
class Progress:
    """How far the sequences that were known at first have come."""

    rollout_tokens: Vector
    """Tokens that each response which began before has generated since."""
    genrm_tokens: Vector
    """The same of judgements."""
    judged_tokens: Vector
    """Tokens that each judgement gains in this time step."""


class TrainingFlow:
    """Groups, the lease and updates of all candidates as time goes on."""

    def __init__(self, model: TrainModel, lends: Mask, defers: Mask) -> None:
        self._model, self._lends, self._defers = model, lends, defers
        n = len(lends)
        self._ready = np.full(n, float(model.groups_ready))
        self._rollout_done, self._genrm_done, self._last = np.zeros(n), np.zeros(n), np.zeros(n)
        """Groups that have passed rollout, those that waited for judgements alone and have them, and those between."""
        self.busy = np.full(n, model.busy_s)
        """Seconds that the present update will go on."""
        self._waking = np.zeros(n)
        self.lent = np.full(n, model.is_lent and model.busy_s <= 0)
        self._lending_s = np.where(lends & ~self.lent, model.from_train_s, 0.0)
        self._batches = np.full(n, float(max(1, model.batches_to_publish)))
        self._due_since = np.full(n, np.inf)
        """Judgement progress at which the due groups had their responses."""
        self.updates, self.useful_s = np.zeros(n), np.zeros(n)

    @property
    def idle(self) -> Mask:
        """No update runs, and no batch is ready or will be of what is under way."""
        return (self.busy <= 0) & (self._ready + self._last < self._model.groups_needed - NEARLY)

    @property
    def left_s(self) -> Vector:
        """Slot-seconds of updates that are still to come."""
        model = self._model
        groups = self._ready + self._last + model.groups.groups - self._rollout_done - self._genrm_done
        batches = np.maximum(0.0, groups) / max(1.0, model.groups_needed)
        return np.asarray((batches * model.update_s + self.busy) * model.slots)

    def step(self, progress: Progress, dt: float) -> Mask:
        """One time step; returns where a new version was published in it."""
        self._make_ready(progress)
        parts = min(_MOST_PARTS, max(1, math.ceil(dt / max(0.5, self._model.update_s / 4))))
        published = np.zeros(len(self.busy), dtype=bool)
        for _ in range(parts):
            published |= self._update(progress, dt / parts)
        return published

    def _make_ready(self, progress: Progress) -> None:
        groups = self._model.groups
        through = np.searchsorted(groups.rollout_tokens, progress.rollout_tokens, side="right").astype(np.float64)
        judged = np.searchsorted(groups.genrm_tokens, progress.genrm_tokens, side="right").astype(np.float64)
        share = -np.expm1(-progress.judged_tokens / max(1.0, groups.last_judgement_tokens))
        ended = self._last * share
        self._last = self._last + through - self._rollout_done - ended
        self._ready = self._ready + ended + judged - self._genrm_done
        self._rollout_done, self._genrm_done = through, judged
        had = progress.rollout_tokens >= groups.due_rollout_tokens
        self._due_since = np.where(had & ~np.isfinite(self._due_since), progress.genrm_tokens, self._due_since)

    def _due_are_ready(self, progress: Progress) -> Mask:
        groups = self._model.groups
        wait = groups.last_judgement_tokens if groups.due_rollout_tokens > 0 else 0.0
        judged = progress.genrm_tokens >= np.maximum(groups.due_genrm_tokens, self._due_since + wait)
        return np.asarray(judged)

    def _update(self, progress: Progress, dt: float) -> Mask:
        model = self._model
        was_busy = self.busy > 0
        # Waking up is no use to anybody.
        spent, woken = np.minimum(self.busy, dt), np.minimum(self._waking, dt)
        self.useful_s = self.useful_s + (spent - woken) * model.slots
        self.busy, self._waking = self.busy - spent, self._waking - woken
        ended = was_busy & (self.busy <= 0)
        self.updates = self.updates + ended
        self._batches = self._batches - ended
        published = ended & (self._batches <= 0)
        self._batches = np.where(published, float(model.batches_per_step), self._batches)
        self._lending_s = np.where(ended & self._lends, model.from_train_s, self._lending_s)
        self._begin(progress)
        free = self._lends & (self.busy <= 0) & ~self.lent
        self._lending_s = np.where(free, self._lending_s - dt, self._lending_s)
        self.lent = self.lent | (free & (self._lending_s <= 0))
        return published

    def _begin(self, progress: Progress) -> None:
        model = self._model
        batches = np.where(self._defers & self.lent, np.maximum(1.0, self._batches), 1.0)
        begins = (self.busy <= 0) & (self._ready >= batches * model.groups_needed - NEARLY)
        begins &= self._due_are_ready(progress) | ((self._batches > 1) & (not model.every_batch_waits))
        self._ready = np.where(begins, self._ready - model.groups_needed, self._ready)
        self._waking = np.where(begins & self.lent, model.to_train_s, self._waking)
        self.busy = np.where(begins, model.update_s + self._waking, self.busy)
        self.lent = self.lent & ~begins
