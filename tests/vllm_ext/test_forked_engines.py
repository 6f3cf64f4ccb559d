"""Forked engines against spawned ones, and several engines in one front end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from engine_helpers import MIB, PROMPTS, engine_pid, logprobs, rpc

from verl_pivot.vllm_ext.engine_args import cpu_engine_kwargs

pytestmark = pytest.mark.engine

EXTENSION = "engine_extensions.ShiftExtension"


def _pss_bytes(pid: int) -> int:
    """Proportional set size: shared pages divided by the number of processes that share them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@pytest.mark.parametrize("shape", [tiny.DENSE, tiny.MOE], ids=["dense", "moe"])
def test_a_forked_engine_computes_what_a_spawned_one_does(
    llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shape: tiny.TinyModel
) -> None:
    import vllm.v1.engine.utils as engine_utils

    path = tiny.model_dir(shape, 1)
    sampling = {"temperature": 1.0, "max_tokens": 24}  # draws from the engine's own random state
    forked = [llm(path, seed=seed, worker_extension_cls=EXTENSION) for seed in (3, 4)]
    samples = [logprobs(engine, **sampling) for engine in forked]
    assert samples[0] != samples[1], "engines of different seeds draw differently"

    with monkeypatch.context() as patch:
        patch.setattr(engine_utils, "get_mp_context", lambda: multiprocessing.get_context("spawn"))
        spawned = llm(path, seed=3, worker_extension_cls=EXTENSION)
    assert logprobs(spawned, **sampling) == samples[0], "bit by bit, samples included"

    seen = [rpc(engine, "surroundings") for engine in forked]
    server = seen[0]["parent"]
    assert server == seen[1]["parent"] != os.getpid()
    assert rpc(spawned, "surroundings")["parent"] == os.getpid()
    assert seen[0]["threads"] == rpc(spawned, "surroundings")["threads"]
    assert _pss_bytes(engine_pid(forked[1])) < 0.75 * _pss_bytes(engine_pid(spawned))


def test_a_forked_engine_follows_its_environment(llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("PIVOT_TEST", "here")
    first = rpc(llm(tiny.model_dir(tiny.DENSE), worker_extension_cls=EXTENSION), "surroundings")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PIVOT_TEST")
    second = rpc(llm(tiny.model_dir(tiny.DENSE), worker_extension_cls=EXTENSION), "surroundings")
    assert (first["threads"], first["environ"].get("PIVOT_TEST")) == (2, "here")
    assert (second["threads"], second["environ"].get("PIVOT_TEST")) == (1, None)


async def _async_engine(path: str, **overrides: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = {"dtype": "float32", "max_model_len": 1024, **cpu_engine_kwargs(32 * MIB), **overrides}
    return AsyncLLM.from_vllm_config(AsyncEngineArgs(model=path, **args).create_engine_config())


async def _run(engine: Any, request_id: str, max_tokens: int) -> Any:
    """The final output of one request, which has one logprob a token however it ended."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    outputs = [output async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, params, request_id)]
    final = outputs[-1].outputs[0]
    assert len(final.token_ids) == len(final.logprobs)
    return final


async def test_engines_of_one_front_end_do_not_touch_each_other(fork_engines: None) -> None:
    """Two policies and a judge: abort and sleep of one, then the death of it, while the others generate."""
    policy, judge = tiny.model_dir(tiny.DENSE, 1), tiny.model_dir(tiny.MOE, 2)
    engines = [await _async_engine(path) for path in (policy, policy, judge)]
    try:
        alone = [(await _run(engine, f"alone-{i}", 40)).token_ids for i, engine in enumerate(engines)]
        assert alone[0] == alone[1] != alone[2]

        running = [asyncio.create_task(_run(engines[0], f"long-{i}", 900)) for i in range(8)]
        others = [asyncio.create_task(_run(engines[i], f"other-{i}", 40)) for i in (1, 2)]
        await asyncio.sleep(0.3)
        await engines[0].sleep(level=1, mode="abort")
        aborted = await asyncio.wait_for(asyncio.gather(*running), 5)
        assert {output.finish_reason for output in aborted} == {"abort"}
        assert [output.token_ids for output in await asyncio.gather(*others)] == alone[1:]

        assert (await engines[0].collective_rpc("load_version", args=(policy, 1))) == [1]
        await engines[0].wake_up()
        assert (await _run(engines[0], "awake", 40)).token_ids == alone[0]

        doomed = asyncio.create_task(_run(engines[0], "doomed", 900))
        others = [asyncio.create_task(_run(engines[i], f"still-{i}", 40)) for i in (1, 2)]
        await asyncio.sleep(0.1)
        await _expect_death(engines[0], doomed)
        assert [output.token_ids for output in await asyncio.gather(*others)] == alone[1:]
    finally:
        for engine in engines:
            engine.shutdown()


async def _expect_death(engine: Any, request: asyncio.Task) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    pid = engine.engine_core.resources.engine_manager.processes[0].pid
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(request, 5)
    with pytest.raises(EngineDeadError):
        await engine.collective_rpc("served_version")
    assert time.monotonic() - killed_s < 5
