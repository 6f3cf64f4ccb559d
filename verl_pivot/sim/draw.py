"""The lengths of everything that a simulated run will do: drawn once, or given; the same for every deployment."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_pivot.core.bound import RolePeak, StepWork
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.training import GradedGroup
from verl_pivot.sim.workload import Counts


class Draws:
    """Lengths [steps, prompts, responses] of responses and judgements; groups are numbered step x prompts + prompt."""

    def __init__(
        self, scenario: Scenario, responses_tokens: Counts, judgement_tokens: Counts, prompt_of: Counts
    ) -> None:
        """``prompt_of``: number of each prompt in the data set [steps, prompts]; the same number is the same prompt."""
        work = scenario.workload
        self._scenario, self._work = scenario, work
        self.responses_tokens, self.judgement_tokens, self.prompt_of = responses_tokens, judgement_tokens, prompt_of
        prompt = work.prompt_tokens + responses_tokens + work.judge_template_tokens
        self.judge_prompt_tokens = np.minimum(prompt, work.judge_prompt_tokens_max)

    @classmethod
    def seeded(cls, scenario: Scenario, steps: int) -> Draws:
        """From the workload's distributions and the scenario's seed."""
        work = scenario.workload
        rng = np.random.default_rng(scenario.seed)
        effects = rng.standard_normal((work.distinct_prompts, 2))
        prompts, responses = work.prompts_per_step, work.responses_per_prompt
        prompt_of = (np.arange(steps * prompts) % work.distinct_prompts).reshape(steps, prompts)
        lengths = np.empty((2, steps, prompts, responses), dtype=np.int64)
        for step in range(steps):
            for kind, spec in enumerate((work.response, work.judgement)):
                lengths[kind, step] = spec.draw(rng, effects[prompt_of[step], kind], responses, step / steps)
        return cls(scenario, lengths[0], lengths[1], prompt_of)

    def responses(self, step: int) -> list[SimSequence]:
        """Requests of one step, prompt by prompt."""
        work = self._work
        lengths = self.responses_tokens[step]
        return [
            SimSequence(
                key=(step * work.prompts_per_step + prompt) * work.responses_per_prompt + response,
                prompt_tokens=work.prompt_tokens,
                total_tokens=int(lengths[prompt, response]),
                group=step * work.prompts_per_step + prompt,
                step=step,
            )
            for prompt in range(work.prompts_per_step)
            for response in range(work.responses_per_prompt)
        ]

    def judgement(self, response: SimSequence) -> SimSequence:
        """The request to a judge that follows a response."""
        place = np.unravel_index(response.key, self.responses_tokens.shape)
        return SimSequence(
            key=response.key,
            prompt_tokens=int(self.judge_prompt_tokens[place]),
            total_tokens=int(self.judgement_tokens[place]),
            group=response.group,
            step=response.step,
        )

    def graded(self, group: int, step: int) -> GradedGroup:
        """What training gets of a group."""
        tokens = int(self.responses_tokens[step, group % self._work.prompts_per_step].sum())
        prompts = self._work.prompt_tokens * self._work.responses_per_prompt
        return GradedGroup(step, tokens, tokens + prompts)

    def context_tokens(self, step: int) -> dict[Role, float]:
        """Mean tokens held by a running sequence of ``step``, over the time it runs."""
        held = {}
        for role, prompt, total in (
            (Role.ROLLOUT, float(self._work.prompt_tokens), self.responses_tokens[step]),
            (Role.GENRM, self.judge_prompt_tokens[step], self.judgement_tokens[step]),
        ):
            held[role] = float(np.sum(total * (prompt + (total - 1) / 2)) / np.sum(total))
        return held

    def work(self, step: int, peaks: Mapping[Role, RolePeak], staleness: int) -> StepWork:
        """The least that ``step`` has to do."""
        scenario, work = self._scenario, self._work
        responses, judgements = self.responses_tokens[step], self.judgement_tokens[step]
        prompts = work.prompt_tokens * responses.size
        trained = float(responses.sum() + prompts)
        train_slot_s = scenario.train.slot_s_per_token * trained
        chain_s = 0.0
        if staleness == 0:
            rollout, judge = peaks[Role.ROLLOUT], peaks[Role.GENRM]
            longest = responses * rollout.step_latency_s + judgements * judge.step_latency_s
            prefill = self.judge_prompt_tokens[step] * judge.prefill_s_per_token
            # The last update is of one mini-batch, at best of the smallest groups.
            smallest = np.sort(responses.sum(axis=1))[: work.mini_batch_prompts].sum()
            last = scenario.train.slot_s_per_token * float(smallest) / scenario.slots
            chain_s = float(np.max(longest + prefill)) + last
        return StepWork(
            {Role.ROLLOUT: float(responses.sum()), Role.GENRM: float(judgements.sum())},
            {Role.ROLLOUT: float(prompts), Role.GENRM: float(self.judge_prompt_tokens[step].sum())},
            train_slot_s,
            chain_s,
        )
