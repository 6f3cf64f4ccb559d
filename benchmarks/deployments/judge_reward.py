"""The reward of the benchmark: a judge model really reads and answers, with an imposed number of tokens.

Loaded by verl by path, in every deployment alike: ``compute_score`` as the custom reward function, and
``PromptRewardManager`` as the reward manager. The manager exists because verl's colocated judge gets neither data
source nor extra info (trainer_base.py:1534 reads prompts, responses and raw_prompt only), on which verl's own managers
fail; this one needs no more than the raw prompt.
"""

from __future__ import annotations

import hashlib
from typing import Any

import aiohttp
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from benchmarks.deployments.lengths import LengthScheme


class PromptRewardManager(RewardManagerBase):
    """Calls the custom reward function with the question, the response and the response's number of tokens."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self._router_address = reward_router_address

    async def run_single(self, data: Any) -> dict[str, Any]:
        item = data[-1:][0]
        responses, attention_mask = item.batch["responses"], item.batch["attention_mask"]
        count = int(attention_mask[-responses.shape[-1] :].sum())
        response = self.tokenizer.decode(responses[:count], skip_special_tokens=True)
        question = list(item.non_tensor_batch["raw_prompt"])[-1]["content"]
        score = await self.compute_score(
            question=question, response=response, response_tokens=count, router_address=self._router_address
        )
        return {"reward_score": score, "reward_extra_info": {"acc": score}}


async def compute_score(
    question: str, response: str, response_tokens: int, router_address: str, model: str, lengths: dict[str, Any]
) -> float:
    """Have the judge generate its imposed number of tokens about ``response``; the score is a hash of the pair's name.

    Raises RuntimeError when the judge does not answer, or with another number of tokens.
    """
    budget = LengthScheme(**lengths).tokens(question, response_tokens)
    payload = {
        "model": model,
        "messages": [{"role": "user", "content": f"{response}\ngrade the above as an answer to {question}"}],
        "max_tokens": budget,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        session.post(f"http://{router_address}/v1/chat/completions", json=payload) as answer,
    ):
        if answer.status != 200:
            raise RuntimeError(f"the judge's router answered HTTP {answer.status}: {(await answer.text())[:500]}")
        generated = (await answer.json())["usage"]["completion_tokens"]
    if generated != budget:
        raise RuntimeError(f"a judgement on {question!r} has {generated} tokens instead of {budget}")
    return hashlib.sha256(f"{question}/{response_tokens}".encode()).digest()[0] / 255
