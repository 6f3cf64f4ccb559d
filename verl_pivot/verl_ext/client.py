"""The client that agent loops generate through: a sequence whose server leaves goes on elsewhere, at once.

Runs in agent-loop workers. Subclasses verl/workers/rollout/llm_server.py:171 (FullyAsyncLLMServerClient), whose resume
sleeps one second each time and fails when no server is there.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_pivot.verl_ext.engine_death import engine_died
from verl_pivot.verl_ext.sequences import ABORTED, prompt_key

logger = logging.getLogger(__name__)

_RESUMES: ContextVar[bool] = ContextVar("resumes", default=False)
"""Whether the attempt that acquires a server goes on with a response: tells the balancer to look elsewhere. verl's
``generate`` lies between the two and hands on to the server whatever it is given."""
MAX_SESSIONS = 10_000
"""Of which a client knows that they have begun."""


class ShiftLLMServerClient(FullyAsyncLLMServerClient):
    """Generates one response across as many servers as it takes, within its token budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sessions: OrderedDict[str, None] = OrderedDict()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate until the response is finished.

        Each attempt resumes from prompt + tokens so far with the budget that is left; every token keeps the logprob
        of the version that made it. A server that dies costs the tokens of its own attempt only.

        Returns:
            The whole response, with ``extra_fields`` ``global_steps``, ``min_global_steps``, ``max_global_steps``
            (policy versions) and ``num_resumes``.
        """
        prompt_ids = normalize_token_ids(prompt_ids)
        limit_key, budget = self._budget(sampling_params)
        response = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        versions: list[int] = []
        num_cached_tokens, resumes = None, 0
        key, group = uuid4().hex, self._group_of(request_id, prompt_ids)
        while True:
            attempt_params = dict(sampling_params)
            if budget is not None:
                attempt_params[limit_key] = budget - len(response.token_ids)
            _RESUMES.set(resumes > 0)
            more = {**kwargs, "sequence": (key, group, len(prompt_ids), len(response.token_ids))}
            output = await self._attempt(request_id, prompt_ids + response.token_ids, attempt_params, more)
            if output is not None:
                _append(response, output)
                if output.token_ids and (version := output.extra_fields.get("global_steps")) is not None:
                    versions.append(version)
                if num_cached_tokens is None:
                    num_cached_tokens = output.extra_fields.get("num_cached_tokens")
                if budget is not None and len(response.token_ids) >= budget:
                    response.stop_reason = "length" if output.stop_reason in ABORTED else output.stop_reason
                    break
                if output.stop_reason not in ABORTED:
                    break
            resumes += 1
        response.extra_fields.update(
            global_steps=versions[-1] if versions else None,
            min_global_steps=min(versions, default=None),
            max_global_steps=max(versions, default=None),
            num_cached_tokens=num_cached_tokens,
            num_resumes=resumes,
        )
        return response

    async def _attempt(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict[str, Any]
    ) -> TokenOutput | None:
        """One try on one server; None when the server was lost with its tokens."""
        try:
            return await LLMServerClient.generate(
                self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            if not engine_died(error):
                raise
            logger.warning("rollout engine lost while generating %s; its sequence starts again elsewhere", request_id)
            await self._load_balancer.report_lost.remote(request_id)
            return None

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return await LLMServerClient._acquire_server(self, request_id, **extra, resumes=_RESUMES.get())

    def _group_of(self, request_id: str, prompt_ids: list[int]) -> str:
        """What siblings share: the prompt. Later turns of a session have no siblings: each says something else."""
        if request_id in self._sessions:
            self._sessions.move_to_end(request_id)
            return ""
        self._sessions[request_id] = None
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return prompt_key(prompt_ids)

    def _budget(self, sampling_params: dict[str, Any]) -> tuple[str, int | None]:
        """The key and value of the token limit; without one, verl's configured response length counts."""
        for key in ("max_tokens", "max_new_tokens"):
            if sampling_params.get(key) is not None:
                return key, int(sampling_params[key])
        return "max_tokens", self._configured_response_length()


def _append(response: TokenOutput, output: TokenOutput) -> None:
    response.token_ids.extend(output.token_ids)
    if output.log_probs is not None:
        response.log_probs.extend(output.log_probs)
    if output.routed_experts is not None and len(output.token_ids) > 0:
        routed = output.routed_experts
        if response.routed_experts is None:
            response.routed_experts = routed
        else:
            response.routed_experts = np.concatenate([response.routed_experts, routed[-len(output.token_ids) :]])
    response.num_preempted += output.num_preempted or 0
    response.stop_reason = output.stop_reason
    for key, value in output.extra_fields.items():
        response.extra_fields.setdefault(key, value)
