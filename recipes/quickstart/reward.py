"""The reward function of the quick start, as a user writes one: a judge model reads each response and grades it.

verl loads this file by its path (``reward.custom_reward_function.path``) in each reward loop worker and awaits
``compute_score`` for one response at a time, many at once. The file stands alone: nothing beside it can be imported.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from verl_pivot.judge import JudgeClient, verdict_parser

JUDGE_PROMPT = "response: {response}\nquestion: {question}"
"""The words that the judge was trained on."""
JUDGE_REPLY_TOKENS = 128
"""Enough for its longest reply."""

ANSWER = re.compile(r"(?:\A|\n)answer: (\d{1,2})\s*\Z")


@lru_cache
def judge_at(router_address: str, deadline_s: float) -> JudgeClient:
    return JudgeClient(
        router_address=router_address,
        prompt=JUDGE_PROMPT,
        parse_score=verdict_parser(yes="verdict: yes", no="verdict: no"),
        deadline_s=deadline_s,
        max_tokens=JUDGE_REPLY_TOKENS,
        default_score=0.0,  # a judge that comes to no verdict did not find the answer right
    )


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
    deadline_s: float = 1800.0,
) -> dict[str, float]:
    """The judge's verdict is the reward (``score``, 0 or 1); the truth is only logged.

    ``acc``: whether the answer is right. ``judge_agrees``: whether the judge saw that. Raises JudgeError when the
    judge does not answer within ``deadline_s`` (``+reward.custom_reward_function.reward_kwargs.deadline_s=...``).
    """
    if reward_router_address is None:
        raise ValueError("this reward function asks a judge: set reward.reward_model.enable=true and its model_path")
    judge = judge_at(reward_router_address, deadline_s)
    result = await judge.score(extra_info["question"], solution_str)
    right = is_right(solution_str, ground_truth)
    return {
        "score": result.score,
        "acc": float(right),
        "judge_agrees": float((result.score > 0.5) == right),
        "judge_unparsed": float(result.outcome == "unparsed"),
        "judge_attempts": float(result.attempts),
        "judge_seconds": result.seconds,
    }


def is_right(response: str, ground_truth: str) -> bool:
    """Whether the last line is ``answer: N`` with N equal to ``ground_truth``."""
    match = ANSWER.search(response)
    return match is not None and int(match[1]) == int(ground_truth)
