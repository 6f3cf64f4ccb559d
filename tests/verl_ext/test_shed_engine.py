"""Giving up some sequences of a real engine: they come back with their tokens, the others never notice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tiny

pytest.importorskip("verl")

from verl_pivot.vllm_ext import distribution
from verl_pivot.vllm_ext.engine_args import cpu_engine_kwargs

distribution.install()

from verl_pivot.verl_ext.server import ShiftHttpServer  # noqa: E402
from verl_pivot.vllm_ext.sampling import for_token_ids  # noqa: E402

pytestmark = pytest.mark.engine

PROMPT = [6 + i % 100 for i in range(12)]
TOKENS = 64


@pytest.fixture
def engine(fork_engines: None) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {"dtype": "float32", "max_model_len": 256, "seed": 0, **cpu_engine_kwargs(32 << 20)}
    made: list[Any] = []

    def make() -> Any:
        made.append(AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny.model_dir(tiny.DENSE)), **settings)))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


async def generate(engine: Any, name: str, prompt: list[int], max_tokens: int, started: asyncio.Event) -> Any:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    wanted = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    params = SamplingParams(**for_token_ids(wanted))
    outputs = []
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id=name):
        started.set()
        outputs.append(output)
    last = outputs[-1].outputs[0]
    assert not last.text and len(last.logprobs) == len(last.token_ids)
    return last


def test_the_sequences_with_fewest_tokens_leave_and_the_others_run_on(engine: Any) -> None:
    async def scenario() -> None:
        llm = engine()
        server = SimpleNamespace(engine=llm)
        whole = (await generate(llm, "whole", PROMPT, TOKENS, asyncio.Event())).token_ids

        running = []
        for number in range(4):  # each begins when the one before has tokens
            started = asyncio.Event()
            running.append(asyncio.ensure_future(generate(llm, f"r{number}", PROMPT, TOKENS, started)))
            await started.wait()
        assert await ShiftHttpServer.shed(server, 2) == 2  # type: ignore[arg-type]
        outputs = await asyncio.gather(*running)
        assert [output.finish_reason for output in outputs] == ["length", "length", "abort", "abort"]
        for output in outputs[:2]:
            assert output.token_ids == whole
        for number, output in enumerate(outputs[2:]):
            so_far = list(output.token_ids)
            assert so_far == list(whole[: len(so_far)]) and len(so_far) < TOKENS
            left = TOKENS - len(so_far)
            rest = await generate(llm, f"again{number}", PROMPT + so_far, left, asyncio.Event())
            assert so_far + list(rest.token_ids) == list(whole)
        assert await ShiftHttpServer.shed(server, 5) == 0  # type: ignore[arg-type]

    asyncio.run(scenario())
