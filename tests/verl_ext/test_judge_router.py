"""The judge router against real HTTP servers on loopback that answer, abort, hang or die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("verl")

from verl.workers.rollout.utils import run_uvicorn

from verl_pivot.config.schema import JudgeConfig
from verl_pivot.verl_ext.judge_router import JudgeRouter

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def completion(text: str, finish_reason: str = "stop") -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]})


@asynccontextmanager
async def judge(handler: Handler):
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(config: JudgeConfig):
    router = JudgeRouter(config)
    port, task = await run_uvicorn(router.app, None, "127.0.0.1")
    try:
        async with aiohttp.ClientSession() as session:

            async def ask(body: dict | None = None) -> tuple[int, dict]:
                async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body or {}) as response:
                    return response.status, await response.json()

            yield router, ask
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not predicate():
            await asyncio.sleep(0.005)


def test_waits_for_a_judge_and_answers_when_one_is_admitted():
    async def scenario():
        async def answer(_):
            return completion("verdict: yes")

        async with judge(answer) as url, serving(JudgeConfig()) as (router, ask):
            poked = []
            router.queue.on_demand = lambda: poked.append(True)
            router.register(url, slot_id=3, limit=8)
            asked = asyncio.ensure_future(ask())
            await settle(lambda: router.queue.queued() == 1)
            assert poked and not asked.done()
            router.queue.admit(3)
            status, payload = await asked
            assert (status, payload["choices"][0]["message"]["content"]) == (200, "verdict: yes")
            assert router.queue.queued() == 0 and router.queue.inflight() == {3: 0}

    asyncio.run(scenario())


def test_fails_with_a_way_out_when_no_judge_comes_in_time():
    async def scenario():
        async with serving(JudgeConfig(queue_deadline_s=0.1)) as (_, ask):
            status, payload = await ask()
            assert status == 503 and "judge.queue_deadline_s" in payload["error"]

    asyncio.run(scenario())


def test_an_aborted_judgement_is_asked_again_elsewhere():
    async def scenario():
        async def leaves(_):
            router.queue.mask(0)
            router.queue.admit(1)
            return completion("verd", finish_reason="abort")

        async def answers(_):
            return completion("verdict: no")

        async with judge(leaves) as first, judge(answers) as second, serving(JudgeConfig()) as (router, ask):
            router.register(first, slot_id=0, limit=8)
            router.register(second, slot_id=1, limit=8)
            router.queue.admit(0)
            status, payload = await ask()
            assert status == 200 and payload["choices"][0]["message"]["content"] == "verdict: no"
            assert router.resubmitted == 1

    asyncio.run(scenario())


def test_a_judge_that_dies_is_reported_and_its_request_goes_elsewhere():
    async def scenario():
        async def dies(request):
            request.transport.close()
            return completion("never seen")

        async def answers(_):
            return completion("verdict: yes")

        async with judge(dies) as first, judge(answers) as second, serving(JudgeConfig()) as (router, ask):
            suspects = []

            def suspect(slot_id, error):
                suspects.append(slot_id)
                router.queue.mask(slot_id)
                router.queue.admit(1)

            router.on_suspect = suspect
            router.register(first, slot_id=0, limit=8)
            router.register(second, slot_id=1, limit=8)
            router.queue.admit(0)
            status, _ = await ask()
            assert status == 200 and suspects == [0]

    asyncio.run(scenario())


def test_client_errors_pass_through_unchanged():
    async def scenario():
        async def refuses(_):
            return web.json_response({"error": "no such model"}, status=404)

        async with judge(refuses) as url, serving(JudgeConfig()) as (router, ask):
            router.register(url, slot_id=0, limit=8)
            router.queue.admit(0)
            assert await ask() == (404, {"error": "no such model"})

    asyncio.run(scenario())


def test_more_requests_than_an_engine_takes_wait_in_the_router():
    async def scenario():
        release = asyncio.Event()
        running = 0
        most = 0

        async def slow(_):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1
            return completion("verdict: yes")

        async with judge(slow) as url, serving(JudgeConfig()) as (router, ask):
            router.register(url, slot_id=0, limit=2)
            router.queue.admit(0)
            asked = [asyncio.ensure_future(ask()) for _ in range(5)]
            await settle(lambda: running == 2 and router.queue.queued() == 3)
            release.set()
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 5
            assert most == 2

    asyncio.run(scenario())


def test_a_judge_that_never_answers_is_cut_off():
    async def scenario():
        async def hangs(_):
            await asyncio.sleep(60)
            return completion("late")

        async with judge(hangs) as url, serving(JudgeConfig(request_deadline_s=0.1)) as (router, ask):
            router.register(url, slot_id=0, limit=8)
            router.queue.admit(0)
            status, payload = await ask()
            assert status == 504 and "0.1 s" in payload["error"]

    asyncio.run(scenario())
