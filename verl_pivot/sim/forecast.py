"""What a planner is told of the work to come, from the same predictor that a run has: never the true lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog, GroupBacklog, Vector
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.scenario import Scenario

REFRESH_S = 4.0
"""Between two predictions; what was predicted is good for longer than a plan."""
_NEW = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


@dataclass(frozen=True)
class Seen:
    """One role's sequences; arrays as they were given."""

    backlog: Backlog
    drawn: Vector
    """Tokens that each has left, one draw of what is likely."""
    chance: Vector
    """A number from 0 to 1 for each, for a draw of what comes after it."""


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

    def look(self, sequences: list[SimSequence]) -> Seen:
        """Of all sequences that have begun and not ended."""
        self._predictor.progress({sequence.key: sequence.generated_tokens for sequence in sequences})
        spread, own = self._predictor.spread([sequence.key for sequence in sequences])
        spread = spread * self._factor
        drawn = spread[np.arange(len(own)), (own * spread.shape[1]).astype(int)]
        new = self._predictor.total_of_new([None], _NEW)[0] * self._factor
        return Seen(Backlog.of(spread, new, self._prompt_tokens), drawn, np.modf(own * 997)[0])

    def new(self, groups: NDArray[np.int64], chance: Vector) -> Vector:
        """Tokens of requests that have not begun, of ``groups`` [n], at quantiles ``chance`` [n]."""
        asked, at = np.unique(groups, return_inverse=True)
        quantiles = self._predictor.total_of_new([int(group) % self._distinct for group in asked], _NEW)
        return np.asarray(quantiles[at, (chance * len(_NEW)).astype(int)] * self._factor)


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
        self.backlog = {role: of.backlog for role, of in seen.items()}
        rollout, genrm = (
            np.array([sequence.group for sequence in open_now[role]], dtype=np.int64) for role in INFERENCE_ROLES
        )
        judgements = self.roles[Role.GENRM].new(rollout, seen[Role.ROLLOUT].chance)
        respond = np.concatenate([seen[Role.ROLLOUT].drawn, np.full(len(genrm), -1.0)])
        judge = np.concatenate([judgements, seen[Role.GENRM].drawn])
        members = np.concatenate([rollout, genrm])
        # The member of each group that has most before it comes last among those of its group.
        order = np.lexsort((np.maximum(respond, 0.0) + judge, members))
        last = order[np.flatnonzero(np.diff(members[order], append=-1))]
        due = members[last] < (due_step + 1) * self._prompts
        self.groups = GroupBacklog.of(respond[last], judge[last], due)
