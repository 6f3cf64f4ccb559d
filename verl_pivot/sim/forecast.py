"""What a planner is told of the work to come, from the same predictor that a run has: never the true lengths."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from verl_pivot.core.backlog import Backlog
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.scenario import Scenario

REFRESH_S = 4.0
"""Between two predictions of one role; what was predicted is good for longer than a plan."""
_NEW = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


class Forecast:
    """Predicts the backlog of one inference role. ``factor`` makes it wrong on purpose: lengths come out that many
    times too long."""

    def __init__(self, scenario: Scenario, role: Role, factor: float = 1.0) -> None:
        work = scenario.workload
        spec = work.response if role is Role.ROLLOUT else work.judgement
        self._predictor = LengthPredictor(spec.max_tokens)
        self._siblings = work.responses_per_prompt
        self._distinct = work.distinct_prompts
        self._prompts = work.prompts_per_step
        self._factor = factor
        self._prompt_tokens = float(work.prompt_tokens)
        self._made_s = -np.inf
        self._made = Backlog()

    def begin(self, sequences: Iterable[SimSequence]) -> None:
        for sequence in sequences:
            self._predictor.start(sequence.key, sequence.group, sequence.group % self._distinct, self._siblings)
            self._prompt_tokens += 0.001 * (sequence.prompt_tokens - self._prompt_tokens)

    def end(self, sequences: Iterable[SimSequence]) -> None:
        for sequence in sequences:
            self._predictor.finish(sequence.key, sequence.total_tokens)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._made_s + REFRESH_S

    def backlog(self, sequences: list[SimSequence], now_s: float) -> Backlog:
        """Of all ``sequences`` that have begun and not ended, when ``is_due``; else the last one."""
        if self.is_due(now_s):
            self._made_s = now_s
            self._predictor.progress({sequence.key: sequence.generated_tokens for sequence in sequences})
            keys = [sequence.key for sequence in sequences]
            left = self._predictor.remaining(keys) if keys else np.empty((0, 5))
            new = self._predictor.total_of_new([None], _NEW)[0]
            self._made = Backlog.of(left * self._factor, new * self._factor, self._prompt_tokens)
        return self._made
