"""The waiting line before engines: order, limits, slots that come and go, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pivot.runtime.admission import AdmissionQueue


def queue_of(*limits: int) -> AdmissionQueue:
    """One engine ``e0``, ``e1``, ... a slot; none admitted."""
    queue = AdmissionQueue()
    for slot_id, limit in enumerate(limits):
        queue.register(f"e{slot_id}", slot_id, limit)
    return queue


def test_a_slot_that_arrives_later_takes_what_waits():
    async def scenario():
        queue = queue_of(2, 2)
        queue.admit(0)
        asked = [asyncio.ensure_future(queue.acquire()) for _ in range(6)]
        await asyncio.sleep(0)
        assert queue.inflight() == {0: 2, 1: 0} and queue.queued() == 4
        queue.admit(1)
        assert queue.inflight() == {0: 2, 1: 2} and queue.queued() == 2
        queue.release("e0")
        queue.release("e1")
        assert [await request for request in asked] == ["e0", "e0", "e1", "e1", "e0", "e1"]
        assert queue.queued() == 0

    asyncio.run(scenario())


def test_the_engine_of_earlier_turns_is_preferred_while_it_has_room():
    async def scenario():
        queue = queue_of(2, 9)  # few enough that preference decides, not balance
        queue.admit(0)
        queue.admit(1)
        chosen = [await queue.acquire(preferred="e0") for _ in range(3)]
        assert chosen == ["e0", "e0", "e1"]
        queue.mask(0)
        queue.release("e0")
        assert await queue.acquire(preferred="e0") == "e1"

    asyncio.run(scenario())


def test_a_preferred_engine_with_much_more_to_do_is_passed_over():
    """What an engine was told to give up must not come straight back to it."""

    async def scenario():
        queue = queue_of(64, 64)
        queue.admit(0)
        for _ in range(20):
            await queue.acquire()
        queue.admit(1)
        chosen = [await queue.acquire(preferred="e0") for _ in range(17)]
        assert chosen == ["e1"] * 16 + ["e0"]

    asyncio.run(scenario())


def test_a_larger_engine_is_found_behind_a_full_small_one():
    async def scenario():
        queue = queue_of(1, 4)
        queue.admit(0)
        queue.admit(1)
        assert [await queue.acquire() for _ in range(5)].count("e1") == 4

    asyncio.run(scenario())


def test_every_request_that_waits_asks_for_a_plan():
    async def scenario():
        queue, asked = queue_of(1), []
        queue.on_demand = lambda: asked.append(True)
        queue.admit(0)
        await queue.acquire()
        assert not asked
        waiting = [asyncio.ensure_future(queue.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        assert len(asked) == 2
        for request in waiting:
            request.cancel()

    asyncio.run(scenario())


def test_a_request_cancelled_when_its_turn_comes_gives_the_engine_back():
    async def scenario():
        queue = queue_of(1)
        queue.admit(0)
        await queue.acquire()
        first, second = (asyncio.ensure_future(queue.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        queue.release("e0")  # granted to the first, which has not run yet
        first.cancel()
        assert await second == "e0"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert queue.inflight() == {0: 1} and queue.queued() == 0

    asyncio.run(scenario())


def test_a_replaced_engine_takes_its_counts_along():
    async def scenario():
        queue = queue_of(1)
        queue.admit(0)
        await queue.acquire()
        queue.forget("e0")
        queue.register("again", 0, 1)
        assert await queue.acquire() == "again"
        queue.release("e0")  # a late answer of the old one
        assert queue.inflight() == {0: 1}

    asyncio.run(scenario())


def test_an_engine_without_room_for_anything_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        AdmissionQueue().register("e", 0, 0)


OPERATION = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.sampled_from(["mask", "admit"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["finish", "give_up"]), st.integers(0, 50)),
)


@settings(deadline=None, max_examples=200)
@given(operations=st.lists(OPERATION, max_size=60), limits=st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_nothing_is_lost_and_no_engine_gets_more_than_it_takes(operations, limits):
    async def scenario():
        queue = queue_of(*limits)
        requests: list[asyncio.Future[str]] = []
        admitted: set[int] = set()
        for operation, value in operations:
            before = dict(queue.inflight())
            if operation == "ask":
                requests.append(asyncio.ensure_future(queue.acquire(ahead=value)))
            elif operation == "finish":
                served = [request for request in requests if request.done()]
                if served:
                    request = served[value % len(served)]
                    requests.remove(request)
                    queue.release(request.result())
            elif operation == "give_up":
                waiting = [request for request in requests if not request.done()]
                if waiting:
                    request = waiting[value % len(waiting)]
                    requests.remove(request)
                    request.cancel()
            else:
                (admitted.add if operation == "admit" else admitted.discard)(value)
                getattr(queue, operation)(value)
            for _ in range(3):
                await asyncio.sleep(0)
            given_to = [request.result() for request in requests if request.done()]
            counts = {slot: given_to.count(f"e{slot}") for slot in range(3)}
            assert counts == queue.inflight()
            assert queue.queued() == sum(not request.done() for request in requests)
            assert all(counts[slot] <= limits[slot] for slot in range(3))
            assert all(counts[slot] <= before[slot] for slot in range(3) if slot not in admitted)
            if queue.queued():
                assert all(counts[slot] == limits[slot] for slot in admitted), "someone waits beside a free engine"
        for request in requests:
            request.cancel()

    asyncio.run(scenario())
