"""The rollout balancer: slots come and go, requests wait instead of failing, counts stay true."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("verl")

from verl_pivot.core.sequences import SequenceState
from verl_pivot.verl_ext.balancer import ShiftBalancer


def two_slots() -> ShiftBalancer:
    balancer = ShiftBalancer()
    balancer.register("a", "handle-a", slot_id=0, limit=8)
    balancer.register("b", "handle-b", slot_id=1, limit=8)
    return balancer


def test_it_knows_which_sequences_wait():
    """Not of those that came through, were called off, or did not say."""

    async def scenario():
        balancer = two_slots()
        said = [SequenceState(key, "g", 10, tokens) for key, tokens in (("a", 0), ("b", 7), ("c", 0))]
        waiting = [
            asyncio.ensure_future(balancer.acquire(f"r{number}", resumes=bool(one.tokens), sequence=tuple(one)))
            for number, one in enumerate(said)
        ]
        silent = asyncio.ensure_future(balancer.acquire("silent"))
        await asyncio.sleep(0)
        assert balancer.queue.queued_sequences() == said
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert balancer.queue.queued_sequences() == said[1:]
        balancer.queue.admit(1)
        assert balancer.queue.queued_sequences() == []
        await asyncio.gather(*waiting[1:], silent)

    asyncio.run(scenario())


def test_a_request_waits_until_a_slot_is_admitted():
    async def scenario():
        balancer = two_slots()
        poked = []
        balancer.queue.on_demand = lambda: poked.append(True)
        waiting = asyncio.ensure_future(balancer.acquire("r"))
        await asyncio.sleep(0)
        assert balancer.queue.queued() == 1 and poked
        balancer.queue.admit(1)
        assert await waiting == ("b", "handle-b")
        assert balancer.queue.queued() == 0 and balancer.queue.inflight() == {0: 0, 1: 1}

    asyncio.run(scenario())


def test_masked_slots_get_nothing_and_the_least_loaded_slot_is_chosen():
    async def scenario():
        balancer = two_slots()
        balancer.queue.admit(0)
        balancer.queue.admit(1)
        for request in range(4):
            await balancer.acquire(f"r{request}")
        assert balancer.queue.inflight() == {0: 2, 1: 2}
        balancer.queue.mask(0)
        chosen = [(await balancer.acquire(f"s{request}"))[0] for request in range(3)]
        assert chosen == ["b"] * 3

    asyncio.run(scenario())


def test_a_sticky_request_moves_on_when_its_slot_leaves():
    async def scenario():
        balancer = two_slots()
        balancer.queue.admit(0)
        assert (await balancer.acquire("r"))[0] == "a"
        balancer.queue.mask(0)
        balancer.queue.admit(1)
        assert (await balancer.acquire("r"))[0] == "b"

    asyncio.run(scenario())


def test_requests_in_flight_are_counted_across_mask_and_admit():
    async def scenario():
        balancer = two_slots()
        balancer.queue.admit(0)
        await balancer.acquire("r")
        balancer.queue.mask(0)
        assert balancer.queue.inflight()[0] == 1
        balancer.queue.admit(0)
        balancer.queue.admit(1)
        assert (await balancer.acquire("s"))[0] == "b"
        balancer.release_server("a")
        assert balancer.queue.inflight() == {0: 0, 1: 1}

    asyncio.run(scenario())


def test_a_waiter_that_gives_up_is_not_counted():
    async def scenario():
        balancer = two_slots()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(balancer.acquire("r"), 0.01)
        assert balancer.queue.queued() == 0

    asyncio.run(scenario())


def test_a_sequence_that_was_cut_off_goes_before_those_that_have_not_begun():
    async def scenario():
        balancer = two_slots()
        balancer.queue.admit(0)
        for request in range(8):
            await balancer.acquire(f"r{request}")
        order = []

        async def ask(request):
            order.append((request, (await balancer.acquire(request))[0]))

        fresh = [asyncio.ensure_future(ask(f"new{i}")) for i in range(3)]
        await asyncio.sleep(0)
        balancer.release_server("a", "r0")
        await asyncio.sleep(0)
        balancer.queue.mask(0)
        balancer.queue.mask(1)
        cut_off = asyncio.ensure_future(ask("r1"))
        await asyncio.sleep(0)
        balancer.queue.admit(1)
        await asyncio.gather(cut_off, *fresh)
        assert order[:2] == [("new0", "a"), ("r1", "b")]
        assert balancer.slot_of_request("r1") == 1

    asyncio.run(scenario())


def test_verls_questions_are_answered_from_the_queue():
    async def scenario():
        balancer = two_slots()
        balancer.queue.admit(1)
        await balancer.acquire("r")
        assert balancer.get_all_servers() == ["b"]
        assert balancer.get_total_inflight() == balancer.get_inflight_count("b") == 1
        assert balancer.get_status()["servers"] == {"b": 1}
        assert balancer.clear_sticky_cache() == {"cleared_entries": 1, "server_loads": {"b": 1}}

    asyncio.run(scenario())


def test_what_a_server_gave_up_goes_to_another():
    async def scenario():
        balancer = two_slots()
        balancer.queue.admit(0)
        for request in range(4):
            await balancer.acquire(f"r{request}")
        balancer.queue.admit(1)
        for request in ("r0", "r1"):
            balancer.release_server("a", request)
        assert [(await balancer.acquire(request, resumes=True))[0] for request in ("r0", "r1")] == ["b", "b"]
        assert balancer.require_acquire_fields() == ["resumes", "sequence"]
        balancer.release_server("a", "r2")
        assert (await balancer.acquire("r2"))[0] == "a", "a later turn stays with its prefix"

    asyncio.run(scenario())
