"""The judge router against real HTTP servers on loopback that answer, abort, hang or die."""

from __future__ import annotations

import asyncio
import json
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


class SlowJudge:
    """Answers when it is released; counts how many requests it has at a time."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.running = self.most = 0

    async def __call__(self, _: web.Request) -> web.Response:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.release.wait()
        self.running -= 1
        return completion("verdict: yes")


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
    router.address = f"http://127.0.0.1:{port}"
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


def record_suspects(router: JudgeRouter) -> list[tuple[int, str]]:
    """(slot, error) of each suspicion that the router reports."""
    suspects = []

    async def suspect(slot_id: int, error: str) -> None:
        suspects.append((slot_id, error))

    router.on_suspect = suspect
    return suspects


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


def streamed(*finish_reasons: str | None) -> web.Response:
    """As vLLM answers ``stream: true``; what is read at once may as well arrive at once."""
    chunks = [json.dumps({"choices": [{"delta": {"content": "v"}, "finish_reason": r}]}) for r in finish_reasons]
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 2}})
    text = "".join(f"data: {event}\n\n" for event in (*chunks, usage, "[DONE]"))
    return web.Response(text=text, content_type="text/event-stream")


@pytest.mark.parametrize(
    "cut_off", [lambda: completion("verd", finish_reason="abort"), lambda: streamed(None, "abort")]
)
def test_an_aborted_judgement_is_asked_again_elsewhere(cut_off: Callable[[], web.Response]):
    async def scenario():
        async def leaves(_):
            router.queue.mask(0)
            router.queue.admit(1)
            return cut_off()

        async def answers(_):
            return completion("verdict: no")

        async with judge(leaves) as first, judge(answers) as second, serving(JudgeConfig()) as (router, ask):
            router.register(first, slot_id=0, limit=8)
            router.register(second, slot_id=1, limit=8)
            router.queue.admit(0)
            status, payload = await ask()
            assert status == 200 and payload["choices"][0]["message"]["content"] == "verdict: no"
            assert router.resubmitted == 1
            assert (router.take_resubmitted(), router.take_resubmitted()) == (1, 0)

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

            async def suspect(slot_id, error):
                suspects.append(slot_id)
                await asyncio.sleep(0.02)  # the engine is asked first
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


def test_an_error_of_a_judge_that_serves_is_passed_on_and_reported():
    async def scenario():
        async def breaks(_):
            return web.json_response({"error": "out of blocks"}, status=500)

        async with judge(breaks) as url, serving(JudgeConfig()) as (router, ask):
            suspects = record_suspects(router)
            router.register(url, slot_id=2, limit=8)
            router.queue.admit(2)
            assert await ask() == (500, {"error": "out of blocks"})
            [(slot_id, error)] = suspects
            assert slot_id == 2 and error.startswith("HTTP 500") and "out of blocks" in error
            assert router.resubmitted == 0 and router.queue.inflight() == {2: 0}

    asyncio.run(scenario())


def test_an_error_of_a_judge_that_has_left_is_asked_again_elsewhere():
    async def scenario():
        async def leaves(_):
            router.queue.mask(0)
            router.queue.admit(1)
            return web.json_response({"error": "shutting down"}, status=503)

        async def answers(_):
            return completion("verdict: yes")

        async with judge(leaves) as first, judge(answers) as second, serving(JudgeConfig()) as (router, ask):
            suspects = record_suspects(router)
            router.register(first, slot_id=0, limit=8)
            router.register(second, slot_id=1, limit=8)
            router.queue.admit(0)
            status, _ = await ask()
            assert (status, router.resubmitted, suspects) == (200, 1, [])

    asyncio.run(scenario())


def test_a_request_whose_judges_leave_again_and_again_ends_at_the_deadline():
    async def scenario():
        asked = 0

        async def leaves(_):
            nonlocal asked
            asked += 1
            if asked == 3:
                await asyncio.sleep(0.6)  # beyond the deadline
            return completion("verd", finish_reason="abort")

        async with judge(leaves) as url, serving(JudgeConfig(queue_deadline_s=0.5)) as (router, ask):
            router.register(url, slot_id=0, limit=8)
            router.queue.admit(0)
            status, payload = await asyncio.wait_for(ask(), 5)
            assert status == 503 and "every judge left" in payload["error"]
            assert router.resubmitted == asked == 3
            assert router.queue.inflight() == {0: 0}

    asyncio.run(scenario())


def test_a_relaunched_judge_takes_the_place_of_its_dead_predecessor():
    async def scenario():
        async def dies(request):
            router.register(new, slot_id=0, limit=8, replaces=old)
            request.transport.close()
            return completion("never seen")

        async def answers(_):
            return completion("verdict: yes")

        async with judge(dies) as old, judge(answers) as new, serving(JudgeConfig()) as (router, ask):
            suspects = record_suspects(router)
            router.register(old, slot_id=0, limit=8)
            router.queue.admit(0)
            status, payload = await asyncio.wait_for(ask(), 5)
            assert status == 200 and payload["choices"][0]["message"]["content"] == "verdict: yes"
            assert suspects == [], "the slot's present engine did not fail"
            assert router.queue.open_engines() == {new: 0} and router.queue.inflight() == {0: 0}

    asyncio.run(scenario())


def test_more_requests_than_an_engine_takes_wait_in_the_router():
    async def scenario():
        slow = SlowJudge()
        async with judge(slow) as url, serving(JudgeConfig()) as (router, ask):
            router.register(url, slot_id=0, limit=2)
            router.queue.admit(0)
            asked = [asyncio.ensure_future(ask()) for _ in range(5)]
            await settle(lambda: slow.running == 2 and router.queue.queued() == 3)
            slow.release.set()
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 5
            assert slow.most == 2

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


def test_an_engine_that_died_behind_its_front_end_answers_for_nobody():
    """The front end outlives the engine's process and says 500; the caller must not see that."""

    async def scenario():
        async def fails(_):
            return web.json_response({"error": "EngineDeadError"}, status=500)

        async def answers(_):
            return completion("verdict: yes")

        async with judge(fails) as first, judge(answers) as second, serving(JudgeConfig()) as (router, ask):

            async def suspect(slot_id, error):
                await asyncio.sleep(0.02)
                router.queue.mask(slot_id)
                router.queue.admit(1)

            router.on_suspect = suspect
            router.register(first, slot_id=0, limit=8)
            router.register(second, slot_id=1, limit=8)
            router.queue.admit(0)
            assert [status for status, _ in await asyncio.gather(*(ask() for _ in range(3)))] == [200] * 3

    asyncio.run(scenario())


def test_more_than_verls_limit_of_connections_reach_a_judge():
    async def scenario():
        slow = SlowJudge()
        async with judge(slow) as url, serving(JudgeConfig()) as (router, _):
            router.register(url, slot_id=0, limit=300)
            router.queue.admit(0)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                address = f"{router.address}/v1/chat/completions"
                asked = [asyncio.ensure_future(session.post(address, json={})) for _ in range(300)]
                await settle(lambda: slow.most == 300)
                slow.release.set()
                assert [response.status for response in await asyncio.gather(*asked)] == [200] * 300

    asyncio.run(scenario())


def test_a_request_whose_caller_left_is_not_judged():
    async def scenario():
        seen = []

        async def answers(_):
            seen.append(True)
            return completion("verdict: yes")

        async with judge(answers) as url, serving(JudgeConfig()) as (router, ask):
            router.register(url, slot_id=0, limit=8)
            impatient = asyncio.ensure_future(ask())
            await settle(lambda: router.queue.queued() == 1)
            impatient.cancel()
            await asyncio.sleep(0.05)
            router.queue.admit(0)
            assert (await ask())[0] == 200
            assert len(seen) == 1 and router.queue.inflight() == {0: 0}

    asyncio.run(scenario())
