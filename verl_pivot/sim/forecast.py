"""What a planner is told of the work to come, from the same predictor that a run has: never the true lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog, GroupBacklog
from verl_pivot.core.lengths import LEVELS, LengthPredictor
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.scenario import Scenario

REFRESH_S = 4.0
"""Between two predictions; what was predicted is good for longer than a plan."""
LAST_JUDGEMENT = 1.25
"""The judgement that a group waits for last, over the mean one: it is not just any."""
_NEW = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


class RoleForecast:
    """Predicts what is left of one inference role. ``factor`` makes it wrong on purpose: lengths come out that many
    times too long."""

    def __init__(self, scenario: Scenario, role: Role, factor: float = 1.0) -> None:
        work = scenario.workload
        spec = work.response if role is Role.ROLLOUT else work.judgement
        self._predictor = LengthPredictor(spec.max_tokens)
        self._siblings = work.responses_per_prompt
        self._distinct = work.distinct_prompts
        self._factor = factor
        self._prompt_tokens = float(work.prompt_tokens)

    def begin(self, sequences: Iterable[SimSequence]) -> None:
        for sequence in sequences:
            self._predictor.start(sequence.key, sequence.group, sequence.group % self._distinct, self._siblings)
            self._prompt_tokens += 0.001 * (sequence.prompt_tokens - self._prompt_tokens)

    def end(self, sequences: Iterable[SimSequence]) -> None:
        for sequence in sequences:
            self._predictor.finish(sequence.key, sequence.total_tokens)

    def look(self, sequences: list[SimSequence]) -> tuple[Backlog, dict[int, float]]:
        """Of all sequences that have begun and not ended: the backlog, and the tokens that the slowest of each group
        has left, in the median."""
        self._predictor.progress({sequence.key: sequence.generated_tokens for sequence in sequences})
        quantiles, spread = self._predictor.outlook([sequence.key for sequence in sequences])
        new = self._predictor.total_of_new([None], _NEW)[0] * self._factor
        members = Counter(sequence.group for sequence in sequences)
        # The median of the largest of k equals is a higher quantile of each.
        levels = 0.5 ** (1 / np.array([members[sequence.group] for sequence in sequences]))
        slowest: dict[int, float] = {}
        for sequence, tokens in zip(sequences, _at_levels(quantiles, levels).tolist(), strict=True):
            slowest[sequence.group] = max(tokens * self._factor, slowest.get(sequence.group, 0.0))
        return Backlog.of(spread * self._factor, new, self._prompt_tokens), slowest


def _at_levels(quantiles: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row of ``quantiles`` [n, len(LEVELS)] at its own level [n], not beyond the highest that is known."""
    grid = np.array(LEVELS)
    above = np.clip(np.searchsorted(grid, levels), 1, len(grid) - 1)
    share = np.clip((levels - grid[above - 1]) / (grid[above] - grid[above - 1]), 0.0, 1.0)
    rows = np.arange(len(levels))
    return np.asarray((1 - share) * quantiles[rows, above - 1] + share * quantiles[rows, above])


class Forecast:
    """Both roles, and the groups that their sequences make. Looks again after ``REFRESH_S``."""

    def __init__(self, scenario: Scenario, factor: float = 1.0) -> None:
        self.roles = {role: RoleForecast(scenario, role, factor) for role in INFERENCE_ROLES}
        self._prompts = scenario.workload.prompts_per_step
        self._made_s = -np.inf
        self.backlog: Mapping[Role, Backlog] = {role: Backlog() for role in INFERENCE_ROLES}
        self.groups = GroupBacklog()

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._made_s + REFRESH_S

    def look(self, open_now: Mapping[Role, list[SimSequence]], due_step: int, now_s: float) -> None:
        """``open_now``: sequences that have begun and not ended. ``due_step``: groups of this step, and of earlier
        ones, may not be trained on later than in the present step."""
        self._made_s = now_s
        seen = {role: self.roles[role].look(open_now[role]) for role in INFERENCE_ROLES}
        self.backlog = {role: backlog for role, (backlog, _) in seen.items()}
        rollout, genrm = seen[Role.ROLLOUT][1], seen[Role.GENRM][1]
        judged_alone = {group: tokens for group, tokens in genrm.items() if group not in rollout}
        last_due = (due_step + 1) * self._prompts
        self.groups = GroupBacklog(
            np.sort(np.array(list(rollout.values()))),
            np.sort(np.array(list(judged_alone.values()))),
            LAST_JUDGEMENT * self.backlog[Role.GENRM].new_mean_tokens,
            max((tokens for group, tokens in rollout.items() if group < last_due), default=0.0),
            max((tokens for group, tokens in judged_alone.items() if group < last_due), default=0.0),
        )
