"""The simulated trainer: takes graded groups, holds the lease while it updates, publishes, lets rollout go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from verl_pivot.core.snapshot import LeaseState, TrainView
from verl_pivot.sim.scenario import Scenario


@dataclass
class StepResult:
    """One training step that ended."""

    step: int
    end_s: float
    response_tokens: int
    groups: int


@dataclass
class GradedGroup:
    """All responses of one prompt, judged."""

    step: int
    response_tokens: int
    tokens: int
    """Prompts and responses."""


class SimTrainer:
    """One training unit over all slots that can host training, of which ``slots`` counts those that live.

    ``poke``: ask the controller for a plan. ``publish``: make rollout engines take the new version.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        *,
        slots: Callable[[], int],
        whole_steps: bool,
        staleness: int,
        poke: Callable[[], None],
        publish: Callable[[int], None],
    ) -> None:
        self._env, self._scenario, self._slots = env, scenario, slots
        self._poke, self._publish = poke, publish
        work = scenario.workload
        self._batches = 1 if whole_steps else work.mini_batches
        self._groups_needed = work.prompts_per_step // self._batches
        self._staleness = staleness
        self._ready: list[GradedGroup] = []
        self._trained: Counter[int] = Counter()
        """Groups of each step that training has taken."""
        self.groups_seen = 0
        """Groups that were ready so far."""
        # Before the first group: a quarter of what responses may have at most.
        work = scenario.workload
        self._tokens_per_group = work.responses_per_prompt * (work.prompt_tokens + work.response.max_tokens / 4)
        self.busy_until_s = 0.0
        self._wanted_since_s = 0.0
        self._batch, self._step = 0, 0
        self._changed = env.event()
        self.lease = LeaseState.FREE
        self.version = 0
        self.steps: list[StepResult] = []
        self.spans: list[tuple[str, float, float]] = []
        """(name, start_s, end_s) of updates and publishes."""

    def view(self, groups_submitted_and_not_ready: int, new_prompts: int) -> TrainView:
        tokens = self._tokens_per_group * self._groups_needed
        is_last = self._batch >= self._batches - 1
        # A batch that has to wait for others is not ready: its slots are of use elsewhere.
        ready = len(self._ready) if self._can_begin() else min(len(self._ready), self._groups_needed - 1)
        return TrainView(
            self.lease,
            ready,
            groups_held=len(self._ready) - ready,
            groups_needed=self._groups_needed,
            groups_open=groups_submitted_and_not_ready,
            update_s=self._scenario.update_s(tokens, max(1, self._slots())),
            busy_s=max(0.0, self.busy_until_s - self._env.now) + is_last * self._scenario.costs.publish_s,
            batches_to_publish=max(1, self._batches - self._batch),
            batches_per_step=self._batches,
            wanted_s=self._env.now - self._wanted_since_s if self.lease is LeaseState.WANTED else 0.0,
            new_prompts=new_prompts,
        )

    def add(self, group: GradedGroup) -> None:
        """A group is ready."""
        self._ready.append(group)
        self.groups_seen += 1
        self._tokens_per_group += 0.05 * (group.tokens - self._tokens_per_group)
        if len(self._ready) >= self._groups_needed:
            self._wake()
        if len(self._ready) == self._groups_needed:
            self._poke()

    def grant(self) -> None:
        """All slots of training have its role."""
        if self.lease is LeaseState.WANTED:
            self.lease = LeaseState.HELD
            self._wake()

    def run(self, steps: int) -> Generator[Any, Any, None]:
        """The trainer's process: ``steps`` steps."""
        env = self._env
        for step in range(steps):
            self._step = step
            tokens = groups = 0
            for batch_number in range(self._batches):
                self._batch = batch_number
                waited = not self._can_begin()
                while not self._can_begin():
                    yield self._wait()
                if waited and self._scenario.costs.collect_s:
                    yield env.timeout(self._scenario.costs.collect_s)
                if self.lease is LeaseState.FREE:
                    self.lease, self._wanted_since_s = LeaseState.WANTED, env.now
                    self._poke()
                while self.lease is not LeaseState.HELD or not self._slots():
                    yield self._wait()
                batch = self._take()
                yield from self._spend("update", self._scenario.update_s(sum(g.tokens for g in batch), self._slots()))
                tokens += sum(group.response_tokens for group in batch)
                groups += len(batch)
                self._batch = batch_number + 1
                if self._batch < self._batches and not self._can_begin():
                    self._release()
            yield from self._spend("publish", self._scenario.costs.publish_s)
            self.version += 1
            self.steps.append(StepResult(step, env.now, tokens, groups))
            self._publish(self.version)
            self._release()

    def _can_begin(self) -> bool:
        """A batch is ready, and nothing is missing that may be trained on in no later step: what step ``s`` submits may
        lag by ``staleness`` versions when it is trained on, and was submitted as many versions early."""
        if len(self._ready) < self._groups_needed:
            return False
        due = self.due_step
        if due < 0 or not self._staleness:
            return True
        size = self._scenario.workload.prompts_per_step
        trained = sum(count for step, count in self._trained.items() if step <= due)
        return trained + sum(group.step <= due for group in self._ready) >= (due + 1) * size

    @property
    def due_step(self) -> int:
        """Groups of this step and of earlier ones may be trained on in no later step; -1: none yet."""
        return self._step if self._step >= self._staleness else -1

    def _take(self) -> list[GradedGroup]:
        """The oldest groups first."""
        self._ready.sort(key=lambda group: group.step)
        batch, self._ready = self._ready[: self._groups_needed], self._ready[self._groups_needed :]
        self._trained.update(group.step for group in batch)
        return batch

    def _spend(self, name: str, seconds: float) -> Generator[Any, Any, None]:
        start_s = self._env.now
        self.busy_until_s = start_s + seconds
        yield self._env.timeout(seconds)
        self.spans.append((name, start_s, self._env.now))

    def _release(self) -> None:
        self.lease = LeaseState.FREE
        self._poke()

    def _wait(self) -> simpy.Event:
        self._changed = self._env.event()
        return self._changed

    def _wake(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()
