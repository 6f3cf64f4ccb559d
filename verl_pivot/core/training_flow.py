"""Training within a projection: batches begin when their groups are ready, hold the slots, and publish a version.

Belongs to ``core.fluid``, which says how many groups are ready. All arrays are [candidates].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from verl_pivot.core.backlog import GroupBacklog, Mask, Vector

_MOST_BATCHES = 4
"""That one time step may end."""


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


class TrainingFlow:
    """The lease and the updates of all candidates as time goes on."""

    def __init__(self, model: TrainModel, lends_now: Mask, lends_again: Mask, waits_for: Vector) -> None:
        """``lends_now``: its slots are on their way to inference, unless they are there or an update runs.
        ``lends_again``: they go there after each update. ``waits_for``: batches that must be ready before lent slots
        are taken."""
        self._model, self._lends_again, self._waits_for = model, lends_again, waits_for
        n = len(lends_now)
        self._ready = np.full(n, float(model.groups_ready))
        """Groups that were ready at the end of the last time step, trained ones among them."""
        self._taken = np.zeros(n)
        self.busy = np.full(n, model.busy_s)
        """Seconds that the present update will go on."""
        self._waking = np.zeros(n)
        self.lent = np.full(n, model.is_lent and model.busy_s <= 0)
        self._lending_s = np.where(lends_now & (self.busy <= 0), model.from_train_s, np.inf)
        """Until slots that have nothing to train serve inference."""
        self._leaving = lends_now & ~self.lent
        self._batches = np.full(n, float(max(1, model.batches_to_publish)))
        self.updates, self.useful_s = np.zeros(n), np.zeros(n)
        known = (model.groups_ready + model.groups.groups) / max(1.0, model.groups_needed)
        self._known_batches = max(1, int(known + 1e-6)) + (model.busy_s > 0)
        self.finished_s = np.full(n, np.inf)
        """When all groups that were known at first have been trained on, from the beginning of the projection."""

    @property
    def idle(self) -> Mask:
        """No update runs, and nothing is ready for another."""
        return (self.busy <= 0) & (self._ready - self._taken < self._model.groups.weight / 2)

    @property
    def left_s(self) -> Vector:
        """Slot-seconds of updates that are still to come."""
        model = self._model
        groups = model.groups_ready + model.groups.groups - self._taken
        batches = np.maximum(0.0, groups) / max(1.0, model.groups_needed)
        return np.asarray((batches * model.update_s + self.busy) * model.slots)

    def step(self, now_s: float, dt: float, ended: Vector, due_are_ready: Mask, work_left: Mask) -> Mask:
        """One time step in which groups come to ``ended`` since the beginning; returns where a version was published.

        ``work_left``: where sequences are still under way; without any, a batch takes what there is."""
        before, self._ready = self._ready, self._model.groups_ready + ended
        left, published = np.full(len(self.busy), dt), np.zeros(len(self.busy), dtype=bool)
        free_s = np.zeros(len(self.busy))
        for _ in range(_MOST_BATCHES):
            spent, woken = np.minimum(self.busy, left), np.minimum(self._waking, left)
            self.useful_s = self.useful_s + (spent - woken) * self._model.slots  # waking up is no use to anybody
            was_busy = self.busy > 0
            self.busy, self._waking, left = self.busy - spent, self._waking - woken, left - spent
            over = was_busy & (self.busy <= 1e-9)
            self.busy = np.where(over, 0.0, self.busy)
            published |= self._end(over, now_s + dt - left)
            begins, wait_s = self._begins(before, dt, dt - left, due_are_ready, work_left)
            free_s = free_s + np.where(begins, wait_s, np.where(self.busy <= 0, left, 0.0))
            left = np.where(begins, left - wait_s, np.where(self.busy <= 0, 0.0, left))
            if not (begins & (left > 0)).any():
                break
        self._lend(free_s)
        return published

    def _end(self, over: Mask, at_s: Vector) -> Mask:
        """Updates are over at ``at_s``; returns where that publishes."""
        self.updates = self.updates + over
        self._batches = self._batches - over
        published = over & (self._batches <= 0)
        finished = over & (self.updates >= self._known_batches) & np.isinf(self.finished_s)
        self.finished_s = np.where(finished, at_s, self.finished_s)
        self._batches = np.where(published, float(self._model.batches_per_step), self._batches)
        lending_s = np.where(self._lends_again, self._model.from_train_s, np.inf)
        self._lending_s = np.where(over, lending_s, self._lending_s)
        return published

    def _begins(
        self, before: Vector, dt: float, passed: Vector, due_are_ready: Mask, work_left: Mask
    ) -> tuple[Mask, Vector]:
        """Where a batch begins, and how long after ``passed`` seconds of the time step."""
        model = self._model
        batches = np.where(self.lent, np.minimum(self._waits_for, self._batches), 1.0)
        needed = self._taken + batches * model.groups_needed - model.groups.weight / 2
        some = self._ready - self._taken >= model.groups.weight / 2
        begins = (self.busy <= 0) & (passed < dt) & ((self._ready >= needed) | (some & ~work_left))
        begins &= due_are_ready | ((self._batches > 1) & (not model.every_batch_waits))
        share = np.clip((needed - before) / np.maximum(self._ready - before, 1e-9), 0.0, 1.0)
        wait_s = np.minimum(np.maximum(0.0, share * dt - passed), dt - passed)
        self._taken = np.where(begins, self._taken + model.groups_needed, self._taken)
        self._waking = np.where(begins, self._way_back_s(wait_s), self._waking)
        self._leaving = self._leaving & ~begins
        self.busy = np.where(begins, model.update_s + self._waking, self.busy)
        self.lent = self.lent & ~begins
        return begins, wait_s

    def _way_back_s(self, wait_s: Vector) -> Vector:
        """Until training has its slots, if it wants them after ``wait_s`` more of waiting. What is on its way to
        inference gets there first."""
        left_s = np.maximum(0.0, self._lending_s - wait_s)
        leaving = self._leaving | (wait_s > 0) | (self._lending_s < self._model.from_train_s)
        away = self.lent | (leaving & np.isfinite(self._lending_s))
        return np.where(away, self._model.to_train_s + np.where(self.lent, 0.0, left_s), 0.0)

    def _lend(self, free_s: Vector) -> None:
        """Slots that had nothing to train for ``free_s`` are on their way to inference, or there."""
        free = (self.busy <= 0) & ~self.lent
        self._lending_s = np.where(free, self._lending_s - free_s, self._lending_s)
        self.lent = self.lent | (free & (self._lending_s <= 0))
