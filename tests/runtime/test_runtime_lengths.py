"""What the controller makes of the sequences that engines and queues tell of."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import ALL_ROLES, Sequence, StillPlanner, VirtualLoop, World, quick_config, run_virtual

from verl_pivot.core.lookahead import LookaheadPlanner
from verl_pivot.core.plan import Plan
from verl_pivot.core.sequences import SequenceEnd, SequenceReport
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role, Snapshot
from verl_pivot.observe.kinds import missing_fields
from verl_pivot.runtime.controller import Controller
from verl_pivot.runtime.lengths import LengthOptions, LengthWatch
from verl_pivot.runtime.training import TrainerState

ROLLOUT, GENRM = Role.ROLLOUT, Role.GENRM
OPTIONS = LengthOptions(
    max_tokens={ROLLOUT: 1000, GENRM: 500}, batch_limits={ROLLOUT: 8, GENRM: 4}, responses_per_prompt=4, refresh_s=0.25
)


class Watching(StillPlanner):
    """Moves what it is told to, and keeps the snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Snapshot] = []

    def plan(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        return super().plan(snapshot)


def controlled(main: Any, planner: Any, watch: LengthWatch, slots: int = 3) -> None:
    """``main`` gets a controller that serves, with slots of all roles: rollout, rollout, genrm."""

    async def run(loop: VirtualLoop) -> None:
        world = World([(GENRM if at == slots - 1 else ROLLOUT, ALL_ROLES) for at in range(slots)], loop)
        config = quick_config()
        controller = Controller(
            world.table, world.engines, world.admissions, planner, config, world.events, loop, watch
        )
        await controller.publish(0)
        await controller.start()
        await main(world, controller)
        await controller.stop()
        assert not world.violations
        told = world.events.of("sequences")
        assert len(told) == (2 if watch is not None else 0)
        assert all(missing_fields(event) == [] for event in told)
        assert all(e["begun"] == e["whole"] + e["cut_off"] + e["open"] for e in told)

    run_virtual(run)


def test_sequences_are_followed_through_queues_and_moves() -> None:
    """Every response begins and ends once in the books, although slot 0 leaves in the middle."""
    planner, watch = Watching(), LengthWatch(OPTIONS)

    async def main(world: World, controller: Controller) -> None:
        sequences = [Sequence(f"s{at}", 20.0 + at, lambda: None) for at in range(10)]
        for sequence in sequences:
            world.admissions[ROLLOUT].submit(sequence)
        for at in range(3):
            world.admissions[GENRM].submit(Sequence(f"j{at}", 5.0, lambda: None))
        controller.train_progress(0, 2, TrainerState(groups_open=3))
        await asyncio.sleep(2.0)
        snapshot = controller.snapshot()
        assert snapshot.backlog[ROLLOUT].sequences == pytest.approx(10), "running and queued"
        assert snapshot.groups is not None
        assert snapshot.batch_limit[ROLLOUT] == 8
        assert snapshot.begins_again == {GENRM}
        planner.wanted[0] = GENRM
        controller.poke()
        await asyncio.sleep(5.0)
        planner.wanted[0] = ROLLOUT
        controller.poke()
        await asyncio.sleep(200.0)
        assert [sequence.ended for sequence in sequences] == [1] * 10
        assert any(sequence.moves for sequence in sequences)
        ledger = watch.ledgers[ROLLOUT]
        assert (ledger.begun, ledger.whole, ledger.cut_off, len(ledger)) == (10, 10, 0, 0)
        judged = watch.ledgers[GENRM]
        assert judged.begun == judged.whole + judged.cut_off

    controlled(main, planner, watch)


def test_the_look_ahead_planner_gets_all_that_it_needs() -> None:
    """Once decode costs are measured it decides itself, with a reason of its own."""
    settings = PlannerSettings(name="lookahead", cooldown_s=0.0, immunity_s=0.0)
    watch = LengthWatch(OPTIONS)
    reasons: list[str] = []

    class Noting(LookaheadPlanner):
        def plan(self, snapshot: Snapshot) -> Plan:
            plan = super().plan(snapshot)
            if set(snapshot.decode) == set(INFERENCE_ROLES):
                reasons.append(plan.reason)
            return plan

    async def main(world: World, controller: Controller) -> None:
        for at in range(4):
            world.admissions[ROLLOUT].submit(Sequence(f"s{at}", 300.0, lambda: None))
            world.admissions[GENRM].submit(Sequence(f"j{at}", 300.0, lambda: None))
        await asyncio.sleep(30.0)

    controlled(main, Noting(settings), watch)
    assert any("all work done in" in reason for reason in reasons), set(reasons)


def test_requests_that_nobody_told_of_count_as_new() -> None:
    watch = LengthWatch(OPTIONS)
    watch.take({}, {ROLLOUT: [], GENRM: []}, 0, 0.0)

    async def main(world: World, controller: Controller) -> None:
        for engine in world.engines.values():
            engine.sequences = lambda: SequenceReport()  # type: ignore[method-assign]
        world.admissions[ROLLOUT].queued_sequences = lambda: []  # type: ignore[method-assign]
        for at in range(6):
            world.admissions[ROLLOUT].submit(Sequence(f"s{at}", 100.0, lambda: None))
        await asyncio.sleep(1.0)
        assert controller.snapshot().backlog[ROLLOUT].sequences == pytest.approx(6)

    controlled(main, StillPlanner(), watch)


def test_without_a_watch_a_snapshot_says_nothing_of_lengths() -> None:
    async def main(world: World, controller: Controller) -> None:
        snapshot = controller.snapshot()
        assert (snapshot.backlog, snapshot.groups, snapshot.batch_limit) == ({}, None, {})

    controlled(main, StillPlanner(), None)  # type: ignore[arg-type]


def taught() -> LengthWatch:
    watch = LengthWatch(OPTIONS)
    for at in range(60):
        ended = (SequenceEnd(f"s{at}", f"g{at // 4}", 10, 40 + at % 5, True),)
        watch.take({ROLLOUT: SequenceReport((), ended)}, {ROLLOUT: [], GENRM: []}, 0, float(at))
    return watch


def test_what_was_learned_survives_a_resume() -> None:
    learned, resumed = taught(), LengthWatch(OPTIONS)
    resumed.load(json.loads(json.dumps(learned.state())))
    expected = learned.forecast.roles[ROLLOUT].longest_of_new(4)
    assert resumed.forecast.roles[ROLLOUT].longest_of_new(4) == pytest.approx(expected, rel=0.2)
    assert len(resumed.ledgers[ROLLOUT]) == 0


@pytest.mark.parametrize(
    "broken",
    [
        {},
        [],
        None,
        {"rollout": {}, "genrm": {}},
        {"rollout": 3, "genrm": 4},
        {**taught().state(), "genrm": {**taught().state()["genrm"], "level": float("nan")}},
        {**taught().state(), "genrm": {**taught().state()["genrm"], "ended": [["a", "b"]]}},
    ],
)
def test_a_broken_state_is_refused_whole(broken: Any) -> None:
    watch = LengthWatch(OPTIONS)
    before = watch.forecast.roles[ROLLOUT].longest_of_new(4)
    with pytest.raises(ValueError):
        watch.load(broken)
    assert watch.forecast.roles[ROLLOUT].longest_of_new(4) == before


def test_memory_bounds_the_batch_once_contexts_are_long() -> None:
    watch = LengthWatch(OPTIONS)

    async def main(world: World, controller: Controller) -> None:
        engine = world.engines[0, ROLLOUT]
        stats = engine.stats

        async def with_memory() -> Any:
            return replace(await stats(), kv_tokens=300)

        engine.stats = with_memory  # type: ignore[method-assign]
        for at in range(2):
            world.admissions[ROLLOUT].submit(Sequence(f"s{at}", 100.0, lambda: None))
        await asyncio.sleep(1.0)
        assert controller.snapshot().batch_limit[ROLLOUT] == pytest.approx(3.0), "each holds 100 tokens"

    controlled(main, StillPlanner(), watch)
