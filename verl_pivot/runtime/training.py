"""What the controller knows of training: what the trainer says, and how long updates and publishes took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from verl_pivot.core.snapshot import LeaseState, TrainView

MEASURED = 5
"""Durations of which the median counts: now and then one holds a checkpoint."""


class TrainPhase(StrEnum):
    """``waiting`` for groups or slots, ``updating`` on a (mini-)batch, ``publishing`` what came of it."""

    WAITING = "waiting"
    UPDATING = "updating"
    PUBLISHING = "publishing"


@dataclass(frozen=True)
class TrainerState:
    """What the trainer says of itself, besides the groups that are ready and needed."""

    phase: TrainPhase = TrainPhase.WAITING
    groups_open: int = 0
    """Groups submitted that are neither ready nor taken."""
    batch: int = 0
    """(Mini-)batch of this step, from 0, that is waited for or trained on."""
    batches_per_step: int = 1
    new_prompts: int = 0
    """Requests to rollout that the next version lets in; 0 when no more are to come."""


class TrainingWatch:
    """Makes the snapshot's view of training."""

    def __init__(self) -> None:
        self.groups_ready = 0
        self.groups_needed = 0
        self._state = TrainerState()
        self._since_s = 0.0
        self._wanted_s: float | None = None
        self._took_s: dict[TrainPhase, deque[float]] = {phase: deque(maxlen=MEASURED) for phase in TrainPhase}

    def progress(self, groups_ready: int, groups_needed: int) -> bool:
        """How far the next batch is; returns whether it has just become ready."""
        became_ready = groups_ready >= groups_needed and self.groups_ready < self.groups_needed
        self.groups_ready, self.groups_needed = groups_ready, groups_needed
        return became_ready

    def says(self, state: TrainerState, now_s: float) -> None:
        """The trainer's present state. Times are taken between two that differ in phase, or in the batch."""
        last, self._state = self._state, state
        if (last.phase, last.batch) != (state.phase, state.batch):
            self._took_s[last.phase].append(now_s - self._since_s)
            self._since_s = now_s

    def released(self, now_s: float) -> None:
        """The lease went back: whatever went on is over."""
        self.groups_ready = 0
        if self._state.phase is not TrainPhase.WAITING:
            self.says(TrainerState(groups_open=self._state.groups_open, batches_per_step=self._state.batches_per_step,
                                   new_prompts=self._state.new_prompts), now_s)  # fmt: skip

    def view(self, lease: LeaseState, now_s: float) -> TrainView:
        state = self._state
        if lease is not LeaseState.WANTED:
            self._wanted_s = None
        elif self._wanted_s is None:
            self._wanted_s = now_s
        return TrainView(
            lease,
            self.groups_ready,
            self.groups_needed,
            groups_open=state.groups_open,
            update_s=self._predicted_s(TrainPhase.UPDATING),
            busy_s=self._busy_s(now_s),
            batches_to_publish=max(1, state.batches_per_step - state.batch),
            batches_per_step=state.batches_per_step,
            wanted_s=0.0 if self._wanted_s is None else now_s - self._wanted_s,
            new_prompts=state.new_prompts,
        )

    def _busy_s(self, now_s: float) -> float:
        phase = self._state.phase
        if phase is TrainPhase.WAITING:
            return 0.0
        left_s = max(0.0, self._predicted_s(phase) - (now_s - self._since_s))
        publishes = phase is TrainPhase.UPDATING and self._state.batch >= self._state.batches_per_step - 1
        return left_s + publishes * self._predicted_s(TrainPhase.PUBLISHING)

    def _predicted_s(self, phase: TrainPhase) -> float:
        return median(self._took_s[phase]) if self._took_s[phase] else 0.0
