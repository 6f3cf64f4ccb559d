"""All engines of a role on a slot: what is asked of which server, and what their errors become."""

from __future__ import annotations

import asyncio
import functools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayActorError
from ray_errors import EngineDeadError, task_error

from verl_pivot.core.sequences import SequenceEnd, SequenceReport, SequenceState
from verl_pivot.core.snapshot import ReplicaLoad, Role
from verl_pivot.runtime.admission import AdmissionQueue
from verl_pivot.runtime.ports import EngineDead, EngineError
from verl_pivot.verl_ext.engines import EngineGroup, ServerRecord

SLOT = 3


class Handle:
    """A server behind ``handle.method.remote(...)``; an answer is a value, an error to raise, or a function."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=functools.partial(self._answer, method))

    async def _answer(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer(*args) if callable(answer) else answer


class OneVersion:
    """A parameter store with one version, which must not go while it is read."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.asked: list[tuple[str, int | None]] = []
        self.leased = False

    @contextmanager
    def open_version(self, model: str, version: int | None) -> Iterator[Any]:
        self.asked.append((model, version))
        self.leased = True
        yield SimpleNamespace(path=Path(f"/{model}/{self.version}"), version=self.version)
        self.leased = False


def group_of(
    *handles: Handle,
    role: Role = Role.ROLLOUT,
    store: Any = None,
    admission: AdmissionQueue | None = None,
    on_relaunch: Callable[[ServerRecord, str], None] = lambda record, old_url: None,
    tells_sequences: bool = False,
) -> EngineGroup:
    records = [ServerRecord(f"s{number}", handle, f"http://old:{number}") for number, handle in enumerate(handles)]
    queue = admission or AdmissionQueue()
    return EngineGroup(SLOT, role, records, store, "policy", queue, on_relaunch, tells_sequences)


@pytest.mark.parametrize("wanted", [8, None])
async def test_every_server_loads_the_version_that_the_store_opens(wanted: int | None) -> None:
    store = OneVersion(8)
    leased = []

    def load(path: str, version: int) -> int:
        leased.append(store.leased)
        return version

    handles = Handle(load_weights=load), Handle(load_weights=load)
    assert await group_of(*handles, store=store).load(wanted) == 8
    assert store.asked == [("policy", wanted)]
    assert [handle.asked for handle in handles] == [[("load_weights", "/policy/8", 8)]] * 2
    assert leased == [True, True] and not store.leased


@pytest.mark.parametrize("served", [(7, 8), (8, 7), (7, 7)])
async def test_servers_with_another_version_are_an_error(served: tuple[int, int]) -> None:
    group = group_of(*[Handle(load_weights=version) for version in served], store=OneVersion(8))
    with pytest.raises(EngineError, match="slot 3 rollout: asked for version 8, serves") as raised:
        await group.load(8)
    assert not isinstance(raised.value, EngineDead)


@pytest.mark.parametrize(("count", "shares"), [(5, [3, 2]), (4, [2, 2]), (1, [1, None]), (0, [None, None])])
async def test_shedding_is_shared(count: int, shares: list[int | None]) -> None:
    handles = [Handle(shed=lambda share: share) for _ in shares]
    assert await group_of(*handles).shed(count) == count
    assert [handle.asked for handle in handles] == [[] if share is None else [("shed", share)] for share in shares]


@pytest.mark.parametrize("error", [RayActorError(), ActorDiedError(), task_error(EngineDeadError("gone"))])
async def test_an_engine_that_died_is_dead(error: Exception) -> None:
    with pytest.raises(EngineDead, match=r"slot 3 genrm: wake_engine: the .*engine.* is gone"):
        await group_of(Handle(), Handle(wake_engine=error), role=Role.GENRM).wake()


async def test_an_operation_that_failed_is_an_error_that_says_where() -> None:
    group = group_of(Handle(sleep_engine=task_error(ValueError("out of memory"))))
    with pytest.raises(EngineError) as raised:
        await group.sleep()
    assert not isinstance(raised.value, EngineDead)
    assert str(raised.value) == "slot 3 rollout: sleep_engine failed: ValueError('out of memory')"


async def test_killing_goes_on_after_a_front_end_that_is_gone() -> None:
    dead, alive = Handle(kill_engine=ActorDiedError()), Handle()
    await group_of(dead, alive).kill()
    assert alive.asked == [("kill_engine",)]


async def test_engines_whose_front_end_is_gone_are_ended_with_all_they_started() -> None:
    """Nobody else would: on a GPU they would hold memory that the next role needs."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    engine = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(600)"])
    worker: list[psutil.Process] = []
    async with asyncio.timeout(20):
        while not worker:
            await asyncio.sleep(0.02)
            worker = psutil.Process(engine.pid).children()
    group = group_of(Handle(engine_pids=[engine.pid], kill_engine=ActorDiedError()))
    assert await group.pids() == [engine.pid]
    await group.kill()
    assert engine.wait(timeout=5) == -signal.SIGKILL
    assert not worker[0].is_running() or worker[0].status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("address", "url"), [("10.0.0.2", "http://10.0.0.2:8001"), ("fd00::2", "http://[fd00::2]:8001")]
)
async def test_only_dead_engines_are_relaunched_and_their_new_address_is_told(address: str, url: str) -> None:
    alive, dead = Handle(is_dead=False), Handle(is_dead=True, relaunch=(address, 8001))
    told = []
    await group_of(alive, dead, on_relaunch=lambda record, old_url: told.append((record, old_url))).restart()
    assert alive.asked == [("is_dead",)]
    assert dead.asked == [("is_dead",), ("relaunch",)]
    assert told == [(ServerRecord("s1", dead, url), "http://old:1")]


def report(running: int, **fields: Any) -> dict[str, Any]:
    return {
        "dead": False,
        "running": running,
        "waiting": 1,
        "context_tokens": 10 * running,
        "tokens_per_s": 2.0 * running,
        "first_token_s": 0.5 * running,
        "kv_tokens": 100,
        **fields,
    }


async def test_load_is_added_up() -> None:
    group = group_of(Handle(load_report=report(2)), Handle(load_report=report(1)))
    assert await group.stats() == ReplicaLoad(
        running=3, waiting=2, context_tokens=30, tokens_per_s=6.0, first_token_s=1.0, kv_tokens=200
    )
    assert group.sequences() == SequenceReport(), "nobody asked for them"


async def test_sequences_of_all_servers_are_told_and_ended_ones_once() -> None:
    """Also those that ended between the last report and a drain."""
    inside, ended, later = ("a", "g", 10, 5), ("b", "g", 10, 7, True), ("a", "g", 10, 9, False)
    handles = (
        Handle(load_report=report(1, sequences=[inside], ended=[]), drain=1, sequence_report={"ended": [later]}),
        Handle(load_report=report(0, sequences=[], ended=[ended]), drain=0, sequence_report={"ended": []}),
    )
    group = group_of(*handles, tells_sequences=True)
    await group.stats()
    assert group.sequences() == SequenceReport((SequenceState(*inside),), (SequenceEnd(*ended),))
    assert group.sequences().ended == ()
    await group.drain()
    assert group.sequences() == SequenceReport((), (SequenceEnd(*later),))
    assert handles[0].asked == [("load_report", True), ("drain",), ("sequence_report",)]


async def test_one_dead_process_makes_the_group_dead() -> None:
    with pytest.raises(EngineDead, match="slot 3 rollout: an engine process is gone"):
        await group_of(Handle(load_report=report(2)), Handle(load_report={"dead": True})).stats()
    with pytest.raises(EngineDead, match="slot 3 rollout: an engine process is gone"):
        await group_of(Handle(is_dead=False), Handle(is_dead=True)).require_alive()
    await group_of(Handle(is_dead=False), Handle(is_dead=False)).require_alive()


async def one_request_on_its_way() -> AdmissionQueue:
    """A queue whose only engine, ``judge`` on SLOT, was given a request and then masked."""
    queue = AdmissionQueue()
    queue.register("judge", SLOT, limit=8)
    queue.admit(SLOT)
    await queue.acquire()
    queue.mask(SLOT)
    return queue


async def test_the_drain_of_a_judge_waits_for_requests_on_their_way() -> None:
    queue = await one_request_on_its_way()
    asked_twice = asyncio.Event()

    def abort_leftovers() -> int:
        asks = handle.asked.count(("abort_leftovers",))
        if asks == 2:
            asked_twice.set()
        return int(asks == 2)  # it arrives between the first look and the second

    handle = Handle(drain=4, abort_leftovers=abort_leftovers)
    draining = asyncio.ensure_future(group_of(handle, role=Role.GENRM, admission=queue).drain())
    await asyncio.wait_for(asked_twice.wait(), 5)
    assert not draining.done()
    queue.release("judge")
    assert await asyncio.wait_for(draining, 5) == 4 + 1
    assert handle.asked[0] == ("drain",)


async def test_the_drain_of_a_rollout_engine_waits_for_nobody() -> None:
    """Its clients come through the server object, whose admission closes before it aborts."""
    handles = Handle(drain=4), Handle(drain=2)
    draining = group_of(*handles, admission=await one_request_on_its_way()).drain()
    assert await asyncio.wait_for(draining, 5) == 6
    assert [handle.asked for handle in handles] == [[("drain",)]] * 2
