"""The agent loop of the benchmark: verl's single turn, with an imposed number of tokens for each response.

verl loads it through ``rollout.agent.agent_loop_config_path`` and instantiates it for each response; the configuration
there carries the length scheme.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from benchmarks.deployments.lengths import LengthScheme

NAME = "budget_agent"


class BudgetAgentLoop(SingleTurnAgentLoop):
    """Response ``session_id`` of a prompt gets exactly ``lengths.tokens(prompt text, session_id)`` tokens."""

    def __init__(self, *args: Any, lengths: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lengths = LengthScheme(**lengths)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Raises RuntimeError when a response does not have its length: deployments would not do equal work."""
        question = kwargs["raw_prompt"][-1]["content"]
        budget = self._lengths.tokens(question, int(kwargs["session_id"]))
        output = await super().run({**sampling_params, "max_tokens": budget, "ignore_eos": True}, **kwargs)
        if len(output.response_ids) != budget:
            raise RuntimeError(f"a response to {question!r} has {len(output.response_ids)} tokens instead of {budget}")
        return output
