"""What an engine is told when its server sleeps, loads and wakes, in every order that a shift uses."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_pivot.vllm_ext import distribution

distribution.install()

from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer  # noqa: E402

from verl_pivot.verl_ext import server as server_module  # noqa: E402
from verl_pivot.verl_ext.server import ShiftHttpServer  # noqa: E402

WAKE_WEIGHTS, WAKE_KV, WAKE_ALL = ("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), ("wake_up", None)
LOAD, SLEEP = ("pivot_load_version", ("/v3", 3), None), ("sleep", 2)
WORKERS_SLEEP = ("sleep", (), {"level": 2})  # past the executor, which may believe that it sleeps already
OPEN = [("reset_prefix_cache", True), ("resume_generation",)]
SERVE = [WAKE_WEIGHTS, LOAD, WAKE_KV, *OPEN]


class RecordingEngine:
    """Notes every call, then fails those of ``failing``; ``reported`` is what its workers answer to a load."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: str | None = None
        self.reported = [3, 3]
        self.errored = False
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=20, block_size=16))
        self.output_processor = SimpleNamespace(request_states={}, process_outputs=lambda outputs: len(outputs))

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name == self.failing:
            raise RuntimeError("out of memory")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._note("wake_up", tags)

    async def sleep(self, level: int) -> None:
        self._note("sleep", level)

    async def reset_prefix_cache(self, reset_connector: bool) -> None:
        self._note("reset_prefix_cache", reset_connector)

    async def is_paused(self) -> bool:
        return False

    async def resume_generation(self) -> None:
        self._note("resume_generation")

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[int]:
        self._note(method, args, kwargs)
        return self.reported

    async def abort(self, request_ids: list[str]) -> None:
        self._note("abort", request_ids)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ShiftHttpServer:
    """As after the launch, asleep, without what verl builds around it."""
    monkeypatch.setattr(vLLMHttpServer, "__init__", lambda self: None)
    server = ShiftHttpServer()
    server.node_rank = 0
    server.config = SimpleNamespace(max_num_seqs=2)
    server.engine = RecordingEngine()
    server._resume_event = asyncio.Event()
    return server


def on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "get_device_name", lambda: device)


STEPS = {
    "load": ("pivot_load_version", lambda server: server.load_weights("/v3", 3)),
    "wake": ("wake_up", lambda server: server.wake_engine()),
    "sleep": ("sleep", lambda server: server.sleep_engine()),
}


async def take(server: ShiftHttpServer, steps: str) -> None:
    """``steps`` in their order; of one that ``fails``, the engine's own operation does."""
    for step in steps.split(", "):
        name, _, fails = step.partition(" ")
        operation, call = STEPS[name]
        server.engine.failing = operation if fails else None
        with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
            await call(server)


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ("load", [WAKE_WEIGHTS, LOAD]),
        ("load, wake", SERVE),
        ("load, wake, sleep", [*SERVE, SLEEP]),
        ("load, wake, sleep, load, wake", [*SERVE, SLEEP, *SERVE]),
        ("load, wake, load, wake", [*SERVE, LOAD, *OPEN]),
        ("load, wake, wake", [*SERVE, *OPEN]),
        ("load, load, wake", [WAKE_WEIGHTS, LOAD, LOAD, WAKE_KV, *OPEN]),
        ("load, sleep", [WAKE_WEIGHTS, LOAD, WAKE_KV, SLEEP]),
        ("load fails, sleep", [WAKE_WEIGHTS, LOAD, WAKE_KV, SLEEP]),
        ("load fails, sleep, load", [WAKE_WEIGHTS, LOAD, WAKE_KV, SLEEP, WAKE_WEIGHTS, LOAD]),
        ("load fails, load, wake", [WAKE_WEIGHTS, LOAD, LOAD, WAKE_KV, *OPEN]),
        ("load, wake fails, sleep", [WAKE_WEIGHTS, LOAD, WAKE_KV, WAKE_KV, SLEEP]),
        ("load, wake, load fails, sleep", [*SERVE, LOAD, SLEEP]),
        ("load, wake, sleep fails, sleep", [*SERVE, SLEEP, SLEEP]),
        ("load, wake, sleep fails, load, wake", [*SERVE, SLEEP, LOAD, *OPEN]),
        ("load, wake, sleep, sleep", [*SERVE, SLEEP]),
        ("sleep", []),
    ],
)
async def test_steps_on_a_gpu(
    server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch, steps: str, calls: list[tuple[Any, ...]]
) -> None:
    on("cuda", monkeypatch)
    await take(server, steps)
    assert server.engine.calls == calls


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ("load", [LOAD]),
        ("load, wake", [LOAD, WAKE_ALL, *OPEN]),
        ("load, wake, sleep", [LOAD, WAKE_ALL, *OPEN, SLEEP]),
        ("load, wake, sleep, load, wake", [LOAD, WAKE_ALL, *OPEN, SLEEP, LOAD, WAKE_ALL, *OPEN]),
        ("load, wake, load, wake", [LOAD, WAKE_ALL, *OPEN, LOAD, *OPEN]),
        ("load, sleep", [LOAD, WORKERS_SLEEP]),
        ("load fails, sleep", [LOAD, WORKERS_SLEEP]),
        ("load, wake fails, sleep", [LOAD, WAKE_ALL, WORKERS_SLEEP]),
        ("load, wake, sleep fails, sleep", [LOAD, WAKE_ALL, *OPEN, SLEEP, SLEEP]),
        ("load, wake, sleep, sleep", [LOAD, WAKE_ALL, *OPEN, SLEEP, WORKERS_SLEEP]),
        ("sleep", [WORKERS_SLEEP]),
    ],
)
async def test_steps_on_a_cpu(
    server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch, steps: str, calls: list[tuple[Any, ...]]
) -> None:
    on("cpu", monkeypatch)
    await take(server, steps)
    assert server.engine.calls == calls


async def test_an_engine_that_holds_nobody_knows_what_does_not_pretend_to_sleep(
    server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("cuda", monkeypatch)
    server.engine.failing = "wake_up"
    with pytest.raises(RuntimeError, match="out of memory"):
        await server.load_weights("/v3", 3)
    server.engine.failing = None
    with pytest.raises(RuntimeError, match="only end"):
        await server.sleep_engine()


async def cannot_serve(server: ShiftHttpServer) -> None:
    with pytest.raises(RuntimeError, match="load a version first"):
        await server.wake_engine()
    assert server.engine.calls[-2:] != OPEN


async def a_response(server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch) -> TokenOutput:
    async def generate(self: vLLMHttpServer, *args: Any) -> TokenOutput:
        return TokenOutput(token_ids=[1], extra_fields={"global_steps": None})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    return await server.generate([1], {}, "r")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("steps", "version"),
    [
        ("load", 3),
        ("load, wake", 3),
        ("load, wake, sleep", None),
        ("load fails", None),
        ("load, wake, load fails", None),
        ("load, wake, sleep, load", 3),
    ],
)
async def test_the_version_is_that_of_the_last_load_if_it_worked(
    server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch, steps: str, version: int | None, device: str
) -> None:
    on(device, monkeypatch)
    await take(server, steps)
    server.engine.failing = None
    server.engine.calls.clear()
    if version is None:
        await cannot_serve(server)
    else:
        await server.wake_engine()
        assert server.engine.calls[-2:] == OPEN
        assert (await a_response(server, monkeypatch)).extra_fields["global_steps"] == version


async def test_the_workers_of_an_engine_must_agree(server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    on("cuda", monkeypatch)
    server.engine.reported = [4, 3]
    with pytest.raises(RuntimeError, match=r"different versions: \[3, 4\]"):
        await server.load_weights("/v4", 4)
    await cannot_serve(server)


# ---- sequences --------------------------------------------------------------------------------------------------


def sequence(prompt_tokens: int, generated: int | None, caller_id: str | None = None) -> SimpleNamespace:
    """As vLLM's RequestState; one that has no detokenizer has ``generated=None``."""
    detokenizer = None if generated is None else SimpleNamespace(output_token_ids=[0] * generated)
    return SimpleNamespace(prompt_len=prompt_tokens, detokenizer=detokenizer, external_req_id=caller_id)


THREE = {"a-1": sequence(10, 5, "a"), "b-1": sequence(3, 1, "b"), "c": sequence(6, None)}


@pytest.mark.parametrize(
    ("count", "aborted"), [(0, []), (1, ["b"]), (2, ["b", "c"]), (3, ["b", "c", "a"]), (9, ["b", "c", "a"])]
)
async def test_the_sequences_with_the_fewest_tokens_are_shed(
    server: ShiftHttpServer, count: int, aborted: list[str]
) -> None:
    server.engine.output_processor.request_states = THREE
    assert await server.shed(count) == len(aborted)
    assert server.engine.calls == ([("abort", aborted)] if aborted else [])


async def test_leftovers_are_all_aborted(server: ShiftHttpServer) -> None:
    assert await server.abort_leftovers() == 0
    assert server.engine.calls == []
    server.engine.output_processor.request_states = THREE
    assert await server.abort_leftovers() == 3
    assert server.engine.calls == [("abort", ["a", "b", "c"])]


# ---- load -------------------------------------------------------------------------------------------------------


class Clock:
    """``time`` of the server."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    return clock


def step_output(request_id: str, tokens: int, reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(request_id=request_id, new_token_ids=[0] * tokens, finish_reason=reason)


async def test_load_is_reported_since_the_last_call(clock: Clock, server: ShiftHttpServer) -> None:
    server._count_tokens()
    processor = server.engine.output_processor
    processor.request_states = THREE
    assert processor.process_outputs([step_output("a-1", 3), step_output("b-1", 3)]) == 2, "vLLM's own result"
    clock.now_s += 2
    assert await server.load_report() == {
        "dead": False,
        "running": 2,
        "waiting": 1,
        "context_tokens": 15 + 4 + 6,
        "tokens_per_s": 3.0,
        "first_token_s": 0.0,
        "kv_tokens": 320,
    }
    clock.now_s += 4
    processor.process_outputs([step_output("a-1", 2)])
    processor.request_states = {"a-1": THREE["a-1"]}
    report = await server.load_report()
    assert (report["running"], report["waiting"], report["tokens_per_s"]) == (1, 0, 0.5)


async def test_a_dead_engine_has_no_load(server: ShiftHttpServer) -> None:
    server.engine.errored = True
    assert server.is_dead()
    assert await server.load_report() == {"dead": True}


async def test_a_response_has_the_version_it_was_admitted_with_and_its_first_token_is_timed(
    clock: Clock, server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("cpu", monkeypatch)
    server._count_tokens()
    await server.load_weights("/v3", 3)

    async def generate(self: ShiftHttpServer, prompt_ids: Any, sampling_params: Any, request_id: str) -> TokenOutput:
        for _ in range(2):  # the second token does not count as a first
            clock.now_s += 2
            self.engine.output_processor.process_outputs([step_output(f"{request_id}-0a1b", 1)])
        self.engine.reported = [4]
        await self.load_weights("/v4", 4)
        return TokenOutput(token_ids=[1, 2], extra_fields={"global_steps": self.global_steps})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    output = await server.generate([1], {}, "r")
    assert output.extra_fields["global_steps"] == 3
    assert (await server.load_report())["first_token_s"] == 2.0
    assert (await server.load_report())["first_token_s"] == 0.0


async def test_a_response_is_told_under_its_clients_key_with_the_tokens_of_all_attempts(
    server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server._count_tokens()
    processor = server.engine.output_processor
    told: list[dict[str, Any]] = []

    async def generate(self: ShiftHttpServer, prompt_ids: Any, sampling_params: Any, request_id: str) -> TokenOutput:
        processor.request_states = {f"{request_id}-0a1b": sequence(10, 3, request_id)}
        told.append(await self.load_report(with_sequences=True))
        processor.process_outputs([step_output(f"{request_id}-0a1b", 1, reason="length")])
        processor.request_states = {}
        return TokenOutput(token_ids=[1] * 4, stop_reason=reasons.pop(0), extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    reasons = ["aborted", "completed"]
    for attempt, tokens in (("r1", 0), ("r2", 4)):
        await server.generate([1], {}, attempt, sequence=("key", "group", 6, tokens))
    assert [report["sequences"] for report in told] == [[("key", "group", 6, 3)], [("key", "group", 6, 7)]]
    assert told[1]["ended"] == [("key", "group", 6, 4, False)]
    assert server.sequence_report() == {"sequences": [], "ended": [("key", "group", 6, 8, True)]}
    assert server.sequence_report()["ended"] == []


async def test_an_attempt_that_raises_is_told_no_more(server: ShiftHttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(self: ShiftHttpServer, *args: Any) -> TokenOutput:
        raise ValueError("the prompt is too long")

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    with pytest.raises(ValueError, match="too long"):
        await server.generate([1], {}, "r", sequence=("key", "group", 6, 0))
    assert server.sequence_report() == {"sequences": [], "ended": []}
    assert not server._sequences._known
