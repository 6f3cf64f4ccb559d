"""Reward functions of the toy runs; verl loads this file in its reward workers.

``ledger`` is a file that gets one JSON line for every response that the function was called for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from verl_pivot.judge import JudgeClient, verdict_parser

DEFAULT_SCORE = -0.5
"""What a response gets whose judge writes garbage, as an untrained one always does."""
SILENCE_S = 2.0
"""How long the function waits for a judge that never answers."""
_clients: dict[str, JudgeClient] = {}


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
    ledger: str,
) -> dict[str, float]:
    """A user's function that knows verl only: it posts to the router's OpenAI-compatible API."""
    url = f"http://{reward_router_address}/v1"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        prompt = [{"role": "user", "content": f"{extra_info['question']} {solution_str[:60]}"}]
        payload = {"model": model, "messages": prompt, "max_tokens": 24, "temperature": 0.0}
        async with session.post(f"{url}/chat/completions", json=payload) as reply:
            if reply.status != 200:
                raise RuntimeError(f"judge: HTTP {reply.status}: {await reply.text()}")
            verdict = (await reply.json())["choices"][0]["message"]["content"]
    right = float(ground_truth in solution_str)
    score = right + 0.01 * (sum(map(ord, verdict)) % 50)
    _note(ledger, index=int(extra_info["index"]), score=score)
    return {"score": score, "acc": right}


async def compute_score_in_chaos(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
    ledger: str,
    broken_index: int,
    silent_index: int,
) -> dict[str, float]:
    """The ready client, and judges that go wrong: the usual one writes garbage, that of ``silent_index`` never
    answers; for ``broken_index`` the function itself raises."""
    index = int(extra_info["index"])
    if index == broken_index:
        _note(ledger, index=index, score=None)
        raise ValueError(f"the reward function cannot grade prompt {index}")
    if index == silent_index:
        _note(ledger, index=index, score=None)
        await _ask_silent_judge()
    result = await _judge(reward_router_address).score(extra_info["question"], solution_str[:60])
    right = float(ground_truth in solution_str)
    _note(ledger, index=index, score=result.score, outcome=result.outcome)
    return {"score": right + result.score, "acc": right}


def _judge(address: str) -> JudgeClient:
    if address not in _clients:
        parser = verdict_parser(yes="VERDICT: RIGHT", no="VERDICT: WRONG")
        settings = {"max_tokens": 48, "garbage_retries": 0, "default_score": DEFAULT_SCORE}
        _clients[address] = JudgeClient(address, "{question} {response}", parser, **settings)
    return _clients[address]


async def _ask_silent_judge() -> None:
    """Raises JudgeError when the deadline of the request has passed."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = JudgeClient(f"127.0.0.1:{port}", "{response}", float, model="silent", deadline_s=SILENCE_S)
        await client.score("", "")


def _note(ledger: str, **fields: Any) -> None:
    with open(ledger, "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
