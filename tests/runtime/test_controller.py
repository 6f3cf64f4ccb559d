"""The controller, case by case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fakes import ALL_ROLES, Sequence, StillPlanner, VirtualLoop, World, quick_config, run_virtual

from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.snapshot import LeaseState, Role, Snapshot
from verl_pivot.observe.kinds import missing_fields
from verl_pivot.runtime.controller import Controller
from verl_pivot.runtime.slots import EngineState

ROLLOUT, GENRM, TRAIN = Role.ROLLOUT, Role.GENRM, Role.TRAIN
THREE = [(ROLLOUT, ALL_ROLES), (ROLLOUT, ALL_ROLES), (GENRM, frozenset({ROLLOUT, GENRM}))]


class Bench:
    """A started controller over a world of slots, with a planner that does as told."""

    def __init__(
        self, loop: VirtualLoop, hosts: list[tuple[Role, frozenset[Role]]], config: ResourceShiftConfig
    ) -> None:
        self.loop, self.world, self.planner = loop, World(hosts, loop), StillPlanner()
        self.controller = Controller(
            self.world.table,
            self.world.engines,
            self.world.admissions,
            self.planner,
            config,
            self.world.events,
            loop,
        )

    def submit(self, n: int, role: Role = ROLLOUT, work_s: float = 5.0) -> list[Sequence]:
        sequences = [Sequence(f"{role}{i}", work_s, lambda: None) for i in range(n)]
        for sequence in sequences:
            self.world.admissions[role].submit(sequence)
        return sequences

    async def move(self, wanted: dict[int, Role]) -> None:
        """Have slots shifted, and wait until no slot is shifting."""
        self.planner.wanted = wanted
        self.controller.poke()
        await asyncio.sleep(0.5)
        self.planner.wanted = {}


def on_bench(
    main: Callable[[Bench], Coroutine[Any, Any, None]],
    hosts: list[tuple[Role, frozenset[Role]]] = THREE,
    start: bool = True,
    **changes: Any,
) -> Bench:
    """Run ``main`` against a started controller, then stop it; nothing forbidden may have happened."""
    config = quick_config(**{k: v for k, v in changes.items() if k != "restart_failed"})
    config.shift.restart_failed = changes.get("restart_failed", True)

    async def run(loop: VirtualLoop) -> Bench:
        bench = Bench(loop, hosts, config)
        if start:
            await bench.controller.start()
        await main(bench)
        await bench.controller.stop()
        return bench

    bench = run_virtual(run)
    bench.world.table.check()
    assert bench.world.violations == []
    assert not any(admission.admitted for admission in bench.world.admissions.values())
    assert [e for e in bench.world.events.all if missing_fields(e)] == []
    return bench


def roles(bench: Bench) -> list[str]:
    return [f"{slot.status} {slot.role}" for slot in bench.world.table.values()]


def test_start_brings_each_slot_to_its_first_role() -> None:
    async def main(bench: Bench) -> None:
        assert roles(bench) == ["serving rollout", "serving rollout", "serving genrm", "serving train"]
        assert bench.world.admissions[ROLLOUT].admitted == {0, 1}
        assert bench.world.admissions[GENRM].admitted == {2}

    on_bench(main, [*THREE, (TRAIN, ALL_ROLES)])


def test_start_goes_on_without_a_slot_and_brings_it_back() -> None:
    async def main(bench: Bench) -> None:
        bench.world.engines[0, ROLLOUT].script["load"].append("hang")
        await bench.controller.start()
        assert roles(bench)[0].startswith("failed")
        await asyncio.sleep(10.0)
        assert roles(bench)[0] == "serving rollout"

    bench = on_bench(main, start=False)
    (failed,), (recovered,) = bench.world.events.of("slot_failed"), bench.world.events.of("slot_recovered")
    assert "load exceeded its deadline" in failed["error"]
    assert (failed["slot"], recovered["slot"], recovered["role"]) == (0, 0, "rollout")


def test_start_refuses_to_run_without_a_role() -> None:
    async def main(bench: Bench) -> None:
        bench.world.engines[2, GENRM].script["load"].append("error")
        with pytest.raises(RuntimeError, match=r"no slot came up in role genrm: slot 2 .*load failed"):
            await bench.controller.start()

    on_bench(main, start=False)


def test_the_lease_waits_for_every_train_slot_and_no_longer() -> None:
    async def main(bench: Bench) -> None:
        bench.submit(6)
        bench.planner.wanted = {0: TRAIN, 1: TRAIN}
        waited_s = await bench.controller.acquire_train(4, 4)
        assert 0.0 < waited_s < 1.0
        bench.world.check_training_memory()
        assert roles(bench) == ["serving train", "serving train", "serving genrm"]
        assert bench.controller.snapshot().train.lease is LeaseState.HELD
        bench.planner.wanted = {}
        await bench.controller.release_train()
        train = bench.controller.snapshot().train
        assert (train.lease, train.groups_ready, train.groups_needed) == (LeaseState.FREE, 0, 4)
        await bench.move({0: ROLLOUT, 1: ROLLOUT})

    bench = on_bench(main)
    assert [e["state"] for e in bench.world.events.of("lease")] == ["wanted", "held", "free"]


def test_a_lost_engine_does_not_hold_up_training() -> None:
    """Its slot is failed with free memory: training takes the slot as it is, and the restart waits for the end."""

    async def main(bench: Bench) -> None:
        bench.world.engines[0, ROLLOUT].script["restart"].extend(["error"] * 3)
        bench.world.engines[0, ROLLOUT].die()
        bench.controller.engine_lost(0, ROLLOUT, "process gone")
        bench.planner.wanted = {1: TRAIN}
        await asyncio.sleep(0.5)
        assert roles(bench)[:2] == ["failed rollout", "serving train"]
        assert await bench.controller.acquire_train(1, 1) == 0.0

    on_bench(main)


def test_no_engine_starts_while_training_runs() -> None:
    async def main(bench: Bench) -> None:
        engine = bench.world.engines[0, ROLLOUT]
        bench.planner.wanted = {0: TRAIN, 1: TRAIN}
        claim = asyncio.ensure_future(bench.controller.acquire_train(1, 1))
        await asyncio.sleep(0)
        engine.die()
        bench.controller.engine_lost(0, ROLLOUT, "process gone")
        await claim
        bench.planner.wanted = {}
        bench.world.is_training = True
        await asyncio.sleep(20.0)
        assert "restart" not in engine.calls
        bench.world.is_training = False
        await bench.controller.release_train()
        await asyncio.sleep(5.0)
        assert roles(bench)[0] == "serving rollout"

    on_bench(main)


def test_an_engine_that_restarts_when_training_comes_stays_asleep() -> None:
    """The lease is granted the moment its restart ends: the slot goes to training, not back to its role."""

    async def main(bench: Bench) -> None:
        engine = bench.world.engines[0, ROLLOUT]
        engine.delay_s = lambda: 1.0
        engine.die()
        bench.controller.engine_lost(0, ROLLOUT, "process gone")
        await asyncio.sleep(1.5)
        assert engine.calls[-1] == "restart"
        bench.planner.wanted = {1: TRAIN}
        assert 0.4 < await bench.controller.acquire_train(1, 1) < 0.6
        bench.world.is_training = True
        await asyncio.sleep(5.0)
        assert roles(bench)[:2] == ["serving train", "serving train"]
        bench.world.is_training = False

    on_bench(main)


def test_an_engine_that_cannot_be_killed_at_first_is_tried_again_although_training_waits() -> None:
    async def main(bench: Bench) -> None:
        engine = bench.world.engines[0, ROLLOUT]
        engine.script["kill"].extend(["error", "hang"])
        bench.planner.wanted = {1: TRAIN}
        engine.freeze()
        claim = asyncio.ensure_future(bench.controller.acquire_train(1, 1))
        await asyncio.sleep(3.0)
        assert roles(bench)[0] == "failed rollout"
        assert bench.world.table[0].engines[ROLLOUT] is EngineState.UNSETTLED
        assert not claim.done()
        assert 3.0 < await claim < 10.0
        bench.world.check_training_memory()

    on_bench(main)


def test_training_that_cannot_get_its_slots_says_why() -> None:
    async def main(bench: Bench) -> None:
        with pytest.raises(RuntimeError, match=r"not free within 300 s .*slot 0 \(serving rollout"):
            await bench.controller.acquire_train(1, 1)
        assert bench.controller.snapshot().train.lease is LeaseState.FREE

    on_bench(main)


@pytest.mark.parametrize("staleness", [0, 1])
def test_publish_reaches_every_awake_rollout_engine(staleness: int) -> None:
    async def main(bench: Bench) -> None:
        sequences = bench.submit(6)
        bench.world.published = 1
        assert await bench.controller.publish(1) == {0: 1, 1: 1}
        bench.world.required = 1
        assert bench.controller.snapshot().policy_version == 1
        bench.submit(2)
        await bench.move({2: ROLLOUT})
        assert bench.world.table[2].versions[ROLLOUT] == 1
        await asyncio.sleep(30.0)
        assert [s.ended for s in sequences] == [1] * 6

    bench = on_bench(main, staleness=staleness)
    loads = [engine.calls.count("load") for (_, role), engine in bench.world.engines.items() if role is ROLLOUT]
    assert loads == [2, 2, 1]


def test_publish_loads_all_at_once_when_nothing_runs_and_in_turns_else() -> None:
    async def duration(bench: Bench) -> None:
        for engine in bench.world.engines.values():
            engine.delay_s = lambda: 1.0
        before_s = bench.loop.time()
        await bench.controller.publish(1)
        durations.append(bench.loop.time() - before_s)

    durations: list[float] = []
    for staleness in (0, 1):
        on_bench(duration, [(ROLLOUT, ALL_ROLES)] * 4, staleness=staleness)
    assert durations == pytest.approx([3.0, 12.0])


def test_a_version_published_before_the_start_is_the_first_one_served() -> None:
    async def main(bench: Bench) -> None:
        bench.world.published = 7
        assert await bench.controller.publish(7) == {}
        await bench.controller.start()
        assert bench.world.table[0].versions == {ROLLOUT: 7, GENRM: None}
        with pytest.raises(ValueError, match="version 6 was published after version 7"):
            await bench.controller.publish(6)

    on_bench(main, start=False)


def test_an_engine_that_does_not_take_the_version_is_left_out_and_comes_back_with_it() -> None:
    async def main(bench: Bench) -> None:
        bench.world.published = 1
        bench.world.engines[0, ROLLOUT].script["load"].append("wrong")
        assert await bench.controller.publish(1) == {1: 1}
        bench.world.required = 1
        await asyncio.sleep(5.0)
        assert roles(bench)[0] == "serving rollout"
        assert bench.world.table[0].versions[ROLLOUT] == 1

    on_bench(main)


def test_a_dead_engine_is_noticed_and_its_sequences_go_elsewhere() -> None:
    async def main(bench: Bench) -> None:
        sequences = bench.submit(6, work_s=2.0)
        bench.world.engines[0, ROLLOUT].die()
        await asyncio.sleep(10.0)
        assert [s.ended for s in sequences] == [1] * 6
        assert roles(bench)[0] == "serving rollout"

    bench = on_bench(main)
    (failed,) = bench.world.events.of("slot_failed")
    assert (failed["slot"], failed["role"]) == (0, "rollout")
    assert len(bench.world.events.of("slot_recovered")) == 1


def test_a_silent_engine_is_killed_so_that_its_clients_go_elsewhere() -> None:
    async def main(bench: Bench) -> None:
        sequences = bench.submit(6, work_s=50.0)
        bench.world.engines[0, ROLLOUT].freeze()
        await asyncio.sleep(200.0)
        assert [s.ended for s in sequences] == [1] * 6
        assert bench.world.engines[0, ROLLOUT].calls.count("kill") == 1

    bench = on_bench(main)
    assert "no load report for" in bench.world.events.of("slot_failed")[0]["error"]


def test_suspicion_is_checked_with_the_engine() -> None:
    async def main(bench: Bench) -> None:
        await bench.controller.examine(0, ROLLOUT, "a client lost it")
        await bench.controller.examine(1, GENRM, "not its role")
        assert roles(bench)[0] == "serving rollout"
        bench.world.engines[0, ROLLOUT].is_alive = False
        asked = bench.world.engines[0, ROLLOUT].calls.count("stats")
        complaints = [bench.controller.examine(0, ROLLOUT, f"client {number} lost it") for number in range(3)]
        await asyncio.gather(*complaints)
        assert bench.world.engines[0, ROLLOUT].calls.count("stats") == asked + 1
        assert roles(bench)[0] != "serving rollout", "who comes back now is not sent to the dead one again"
        await asyncio.sleep(10.0)
        assert roles(bench)[0] == "serving rollout"

    bench = on_bench(main, start=True)
    (failed,) = bench.world.events.of("slot_failed")
    assert "slot 0 rollout engine" in failed["error"]


def test_whoever_waits_is_told_where_slots_and_requests_are() -> None:
    async def main(bench: Bench) -> None:
        idle = bench.controller.whereabouts()
        assert "every slot has its role" in idle and "agent loops or reward functions" in idle
        bench.submit(6, work_s=50.0)
        bench.world.engines[2, ROLLOUT].script["load"].append("hang")
        moving = asyncio.ensure_future(bench.move({2: ROLLOUT}))
        await asyncio.sleep(0.4)
        busy = bench.controller.whereabouts()
        assert "slot 2" in busy and "rollout runs 6 and 0 wait" in busy and "agent loops" not in busy
        moving.cancel()

    on_bench(main)


def test_an_engine_lost_in_its_sleep_costs_nothing_until_it_is_needed() -> None:
    async def main(bench: Bench) -> None:
        bench.world.engines[0, GENRM].die()
        bench.controller.engine_lost(0, GENRM, "process gone")
        assert roles(bench)[0] == "serving rollout"
        await bench.move({0: GENRM})
        assert roles(bench)[0] == "serving genrm"

    assert on_bench(main).world.events.of("slot_failed") == []


def test_without_restarts_a_slot_stays_failed_and_dead_engines_are_not_offered() -> None:
    async def main(bench: Bench) -> None:
        bench.world.engines[0, ROLLOUT].die()
        bench.world.engines[1, GENRM].die()
        bench.controller.engine_lost(0, ROLLOUT, "process gone")
        bench.controller.engine_lost(1, GENRM, "process gone")
        await asyncio.sleep(50.0)
        assert roles(bench)[:2] == ["failed rollout", "serving rollout"]
        assert bench.controller.snapshot().slots[1].can_host == {ROLLOUT, TRAIN}
        assert bench.world.table[0].engines[ROLLOUT] is EngineState.DEAD

    on_bench(main, restart_failed=False)


def test_a_slot_that_never_restarts_is_given_up() -> None:
    async def main(bench: Bench) -> None:
        bench.world.engines[0, ROLLOUT].script["restart"].extend(["hang", "error", "error"])
        bench.world.engines[0, ROLLOUT].die()
        await asyncio.sleep(100.0)
        assert roles(bench)[0] == "failed rollout"
        assert bench.world.engines[0, ROLLOUT].calls.count("restart") == 3

    on_bench(main)


class BadPlanner:
    name = "bad"

    def __init__(self, shift: Shift | None) -> None:
        self.shift = shift

    def plan(self, snapshot: Snapshot) -> Plan:
        if self.shift is None:
            raise ZeroDivisionError("a bug")
        return Plan((self.shift,), "bad")


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        (None, "a bug"),
        (Shift(2, GENRM, TRAIN, 1, 0, ""), "it can host rollout, genrm"),
        (Shift(0, GENRM, TRAIN, 1, 0, ""), "the plan takes it for genrm"),
        (Shift(9, GENRM, TRAIN, 1, 0, ""), "there is no slot 9"),
    ],
)
def test_a_planner_that_breaks_stops_the_controller_loudly(shift: Shift | None, message: str) -> None:
    async def main(bench: Bench) -> None:
        bench.controller._planner = BadPlanner(shift)
        with pytest.raises(RuntimeError, match=message):
            await bench.controller.acquire_train(1, 1)
        with pytest.raises(RuntimeError, match=message):
            await bench.controller.publish(1)

    on_bench(main)


def test_a_plan_cannot_take_a_slot_from_training() -> None:
    async def main(bench: Bench) -> None:
        await bench.controller.acquire_train(1, 1)
        bench.planner.wanted = {0: ROLLOUT}
        bench.controller.poke()
        await asyncio.sleep(1.0)
        with pytest.raises(RuntimeError, match="but the lease is held"):
            await bench.controller.release_train()

    on_bench(main, [(TRAIN, ALL_ROLES)])


def test_events_of_a_quiet_run() -> None:
    async def main(bench: Bench) -> None:
        bench.submit(3, GENRM)
        await asyncio.sleep(3.0)
        assert bench.controller.snapshot().demand[GENRM].inflight == 3

    bench = on_bench(main)
    assert [(e["reason"], e["shifts"]) for e in bench.world.events.of("plan")] == [("told to", 0)]
    loads = bench.world.events.of("load")
    assert 5 <= len(loads) <= 7
    assert loads[-1]["slots"]["2"] == {
        "role": "genrm",
        "status": "serving",
        "running": 3,
        "waiting": 0,
        "tokens_per_s": 50.0,
        "context_tokens": 300,
        "first_token_s": 0.0,
    }
    assert loads[-1]["queued"] == {"rollout": 0, "genrm": 0}


def test_a_slot_that_arrives_late_gets_its_part_of_what_runs() -> None:
    async def main(bench: Bench) -> None:
        await bench.move({1: GENRM})
        for n in (1, 2, 3):  # loads that differ, from which the decode cost is learned
            bench.submit(n, work_s=2.0)
            await asyncio.sleep(3.0)
        sequences = bench.submit(4, work_s=30.0)
        await asyncio.sleep(1.0)
        await bench.move({1: ROLLOUT})
        await asyncio.sleep(1.0)
        running = [len(bench.world.engines[slot, ROLLOUT].running) for slot in (0, 1)]
        assert running == [2, 2]
        assert sorted(sequence.moves for sequence in sequences) == [0, 0, 1, 1]
        await asyncio.sleep(60.0)
        assert [sequence.ended for sequence in sequences] == [1] * 4

    bench = on_bench(main)
    assert [(e["slot"], e["role"], e["moved"]) for e in bench.world.events.of("evened")] == [(0, "rollout", 2)]


def test_an_engine_that_cannot_give_up_sequences_serves_on() -> None:
    async def main(bench: Bench) -> None:
        await bench.move({1: GENRM})
        for n in (1, 2, 3):
            bench.submit(n, work_s=2.0)
            await asyncio.sleep(3.0)
        bench.world.engines[0, ROLLOUT].script["shed"].extend(["error"] * 100)
        sequences = bench.submit(4, work_s=30.0)
        await asyncio.sleep(1.0)
        await bench.move({1: ROLLOUT})
        await asyncio.sleep(40.0)
        assert [(s.ended, s.moves) for s in sequences] == [(1, 0)] * 4
        assert roles(bench) == ["serving rollout", "serving rollout", "serving genrm"]

    assert not on_bench(main).world.events.of("evened")


def test_shift_times_are_learned() -> None:
    async def main(bench: Bench) -> None:
        await bench.move({0: GENRM})
        snapshot = bench.controller.snapshot()
        assert snapshot.shift_costs.shift_s == pytest.approx({(ROLLOUT, GENRM): 0.04})
        assert snapshot.last_shift_s is not None

    on_bench(main)


def test_stop_ends_everything_and_later_calls_say_so() -> None:
    async def main(bench: Bench) -> None:
        bench.planner.wanted = {0: TRAIN}
        for engine in bench.world.engines.values():
            engine.script["drain"].append("hang")
        claim = asyncio.ensure_future(bench.controller.acquire_train(1, 1))
        publish = asyncio.ensure_future(bench.controller.publish(1))
        await asyncio.sleep(0.5)
        await bench.controller.stop()
        for waiting in (claim, publish):
            with pytest.raises(RuntimeError, match="the controller was stopped"):
                await waiting
        with pytest.raises(RuntimeError, match="the controller was stopped"):
            await bench.controller.start()
        bench.controller.engine_lost(1, ROLLOUT, "too late")

    on_bench(main)


def test_ports_that_are_missing_are_named() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(THREE, loop)
        del world.engines[1, GENRM]
        with pytest.raises(ValueError, match="slot 1 can host genrm"):
            Controller(world.table, world.engines, world.admissions, StillPlanner(), quick_config(), world.events, loop)

    run_virtual(main)
