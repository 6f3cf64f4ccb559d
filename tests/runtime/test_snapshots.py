"""What the controller sees: loads, lost engines and learned costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from fakes import ALL_ROLES, Sequence, VirtualLoop, World, run_virtual

from verl_pivot.core.snapshot import ReplicaLoad, Role, RoleDemand, SlotStatus
from verl_pivot.runtime.slots import EngineState
from verl_pivot.runtime.snapshots import LoadMonitor, demand_of

ROLLOUT, GENRM, TRAIN = Role.ROLLOUT, Role.GENRM, Role.TRAIN


def with_monitor(main: Callable[[World, LoadMonitor], Coroutine[Any, Any, None]]) -> None:
    """``main`` gets two rollout slots that serve."""

    async def run(loop: VirtualLoop) -> None:
        world = World([(ROLLOUT, ALL_ROLES)] * 2, loop)
        monitor = LoadMonitor(world.table, world.engines, loop, timeout_s=1.0, silence_s=5.0, hides_dead=False)
        for slot in world.table.values():
            await world.engines[slot.slot_id, ROLLOUT].load(0)
            await world.engines[slot.slot_id, ROLLOUT].wake()
            slot.set_engine(ROLLOUT, EngineState.AWAKE)
            slot.versions[ROLLOUT] = 0
            slot.finish(loop.time())
        for i in range(3):
            world.admissions[ROLLOUT].submit(Sequence(f"s{i}", 1000.0, lambda: None))
        world.admissions[ROLLOUT].admit(0)
        await main(world, monitor)

    run_virtual(run)


def leave_and_come_back(world: World) -> None:
    slot = world.table[0]
    slot.begin_refresh()
    slot.finish(world.clock.time())


def test_loads_are_asked_for_at_once_and_shown() -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        for engine in world.engines.values():
            engine.delay_s = lambda: 0.5
        before_s = world.clock.time()
        assert await monitor.collect() == []
        assert world.clock.time() - before_s == pytest.approx(0.5)
        first, second = monitor.views()
        assert first.load == ReplicaLoad(3, 0, 300, 50.0)
        assert second.load == ReplicaLoad()
        assert demand_of(world.admissions)[ROLLOUT] == RoleDemand(0, 3)

    with_monitor(main)


def test_an_answer_of_an_earlier_epoch_is_dropped() -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        await monitor.collect()
        assert monitor.load_of(world.table[0]).running == 3
        leave_and_come_back(world)
        assert monitor.load_of(world.table[0]) == ReplicaLoad()
        round_ = asyncio.ensure_future(monitor.collect())
        await asyncio.sleep(0.005)
        leave_and_come_back(world)
        await round_
        assert monitor.load_of(world.table[0]) == ReplicaLoad()
        world.table[0].begin_shift(GENRM)
        view = monitor.views()[0]
        assert (view.status, view.role, view.target) == (SlotStatus.SHIFTING, ROLLOUT, GENRM)

    with_monitor(main)


@pytest.mark.parametrize("slot_moved_on", [False, True])
def test_a_death_counts_unless_the_slot_moved_on(slot_moved_on: bool) -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        world.engines[0, ROLLOUT].script["stats"].append("dead")
        world.engines[0, ROLLOUT].delay_s = lambda: 0.5
        round_ = asyncio.ensure_future(monitor.collect())
        if slot_moved_on:
            world.table[0].begin_refresh()
        lost = await round_
        assert [(x.slot.slot_id, x.role, x.is_dead) for x in lost] == ([] if slot_moved_on else [(0, ROLLOUT, True)])

    async def late(world: World, monitor: LoadMonitor) -> None:
        engine = world.engines[0, ROLLOUT]
        engine.delay_s = lambda: 0.5
        round_ = asyncio.ensure_future(monitor.collect())
        await asyncio.sleep(0.1)
        if slot_moved_on:
            leave_and_come_back(world)
        engine.die()
        assert len(await round_) == (0 if slot_moved_on else 1)

    with_monitor(late)
    if not slot_moved_on:
        with_monitor(main)


def test_an_engine_is_lost_after_long_silence_only() -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        world.engines[0, ROLLOUT].script["stats"].extend(["hang", "error", "ok", *["hang"] * 9])
        found_s: list[float] = []
        started_s = world.clock.time()
        while not found_s:
            lost = await monitor.collect()
            found_s.extend(world.clock.time() - started_s for x in lost if not x.is_dead)
        assert 6.0 <= found_s[0] <= 7.2
        leave_and_come_back(world)
        assert await monitor.collect() == [], "a new epoch begins with a clean slate"

    with_monitor(main)


def test_decode_costs_appear_once_enough_was_seen() -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        await monitor.collect()
        assert monitor.decode_costs() == {}
        for _ in range(10):
            await monitor.collect()
        costs = monitor.decode_costs()
        assert set(costs) == {ROLLOUT}
        assert costs[ROLLOUT].step_latency_s(3, 300) == pytest.approx(3 / 50)

    with_monitor(main)


def test_sequences_are_told_of_slots_that_serve_and_ended_ones_once() -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        assert monitor.take_sequences()[ROLLOUT].running == (), "nobody has been asked"
        await monitor.collect()
        assert [state.key for state in monitor.take_sequences()[ROLLOUT].running] == ["s0", "s1", "s2"]
        await world.engines[0, ROLLOUT].shed(1)
        world.table[0].begin_shift(GENRM)
        told = monitor.take_sequences()[ROLLOUT]
        assert (told.running, [end.key for end in told.ended]) == ((), ["s0"]), "ended ones also of a slot that leaves"
        assert monitor.take_sequences()[ROLLOUT].ended == ()

    with_monitor(main)


def test_the_time_to_a_first_token_is_that_of_requests_that_waited_for_nothing() -> None:
    async def main(world: World, monitor: LoadMonitor) -> None:
        assert monitor.undelayed_first_token_s() == {}
        engine, waits_s = world.engines[0, ROLLOUT], [0.5, 9.0, 0.4, 7.0, 0.6]
        stats = engine.stats

        async def with_wait() -> ReplicaLoad:
            return replace(await stats(), first_token_s=waits_s.pop(0) if waits_s else 0.0)

        engine.stats = with_wait  # type: ignore[method-assign]
        for _ in range(8):
            await monitor.collect()
        assert monitor.undelayed_first_token_s() == {ROLLOUT: 0.4}

    with_monitor(main)
