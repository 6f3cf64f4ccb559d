"""What a planner is told of the work to come in a simulated run: observations for the forecast that a real run makes
too, never the true lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl_pivot.core import forecast as core
from verl_pivot.core.backlog import Backlog, GroupBacklog
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.scenario import Scenario


class RoleForecast:
    """Tells one role's forecast what the simulator's sequences do. ``factor``: lengths come out that many times too
    long."""

    def __init__(self, scenario: Scenario, role: Role, factor: float = 1.0) -> None:
        work = scenario.workload
        spec = work.response if role is Role.ROLLOUT else work.judgement
        predictor = LengthPredictor(spec.max_tokens)
        self.core = core.RoleForecast(predictor, work.responses_per_prompt, float(work.prompt_tokens), factor)
        self._distinct = work.distinct_prompts

    def begin(self, sequences: Iterable[SimSequence]) -> None:
        self.core.begin(self.observe(sequences))

    def end(self, sequences: Iterable[SimSequence]) -> None:
        for sequence in sequences:
            self.core.end(sequence.key, sequence.total_tokens)

    def observe(self, sequences: Iterable[SimSequence]) -> list[core.Observation]:
        return [
            core.Observation(s.key, s.group, s.group % self._distinct, s.prompt_tokens, s.generated_tokens)
            for s in sequences
        ]


class Forecast:
    """Both roles. Groups are numbered in the order of their steps."""

    def __init__(self, scenario: Scenario, factor: float = 1.0) -> None:
        self.roles = {role: RoleForecast(scenario, role, factor) for role in INFERENCE_ROLES}
        self._core = core.Forecast({role: forecast.core for role, forecast in self.roles.items()})
        self._prompts = scenario.workload.prompts_per_step

    @property
    def backlog(self) -> Mapping[Role, Backlog]:
        return self._core.backlog

    @property
    def groups(self) -> GroupBacklog:
        return self._core.groups

    def is_due(self, now_s: float, requests: Mapping[Role, int]) -> bool:
        return self._core.is_due(now_s, requests)

    def look(self, open_now: Mapping[Role, list[SimSequence]], due_step: int, now_s: float) -> None:
        """``open_now``: sequences that have begun and not ended. ``due_step``: groups of this step, and of earlier
        ones, may not be trained on later than in the present step."""
        observed = {role: self.roles[role].observe(open_now[role]) for role in INFERENCE_ROLES}
        last_due = (due_step + 1) * self._prompts
        self._core.look(observed, lambda group: group < last_due, now_s)
