"""The shift transaction: a failure at every step, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from fakes import ALL_ROLES, Sequence, VirtualLoop, World, quick_config, run_virtual

from verl_pivot.core.plan import Shift
from verl_pivot.core.snapshot import Role, SlotStatus
from verl_pivot.observe.kinds import missing_fields
from verl_pivot.runtime.shift import bring_up, refresh, run_shift
from verl_pivot.runtime.slots import EngineState, SlotError
from verl_pivot.runtime.steps import ShiftOutcome, ShiftPorts, StepTimeout, within

ROLLOUT, GENRM, TRAIN = Role.ROLLOUT, Role.GENRM, Role.TRAIN
ASLEEP, AWAKE, DEAD, UNSETTLED = EngineState.ASLEEP, EngineState.AWAKE, EngineState.DEAD, EngineState.UNSETTLED
Script = Mapping[tuple[Role, str], list[str]]


def ports_of(world: World) -> ShiftPorts:
    return ShiftPorts(
        world.engines,
        world.admissions,
        world.clock,
        quick_config().shift,
        lambda role: world.published if role is ROLLOUT else None,
        world.events,
    )


@dataclass
class Result:
    world: World
    outcome: ShiftOutcome
    sequences: list[Sequence]


def shift_under(script: Script, source: Role = ROLLOUT, target: Role = GENRM) -> Result:
    """Slot 0 shifts while ``script`` goes wrong; slot 1 is a healthy rollout slot. Six sequences are under way."""

    async def main(loop: VirtualLoop) -> Result:
        world = World([(source, ALL_ROLES), (ROLLOUT, ALL_ROLES)], loop)
        ports = ports_of(world)
        for slot in world.table.values():
            await bring_up(slot, ports)
        sequences = [Sequence(f"s{i}", 5.0, lambda: None) for i in range(6)]
        for sequence in sequences:
            world.admissions[ROLLOUT].submit(sequence)
        for (role, operation), behaviours in script.items():
            world.engines[0, role].script[operation].extend(behaviours)
        slot = world.table[0]
        slot.begin_shift(target)
        outcome = await run_shift(slot, Shift(0, source, target, 3.0, 1.0, "because"), ports)
        world.table.check()
        await asyncio.sleep(100.0)
        return Result(world, outcome, sequences)

    return run_virtual(main)


def states(world: World) -> tuple[EngineState, EngineState]:
    engines = world.table[0].engines
    return engines[ROLLOUT], engines[GENRM]


CASES: dict[str, tuple[Script, str, tuple[EngineState, EngineState]]] = {
    "nothing": ({}, "done", (ASLEEP, AWAKE)),
    "drain fails": ({(ROLLOUT, "drain"): ["error"]}, "rolled_back", (AWAKE, ASLEEP)),
    "drain hangs": ({(ROLLOUT, "drain"): ["hang"]}, "rolled_back", (AWAKE, ASLEEP)),
    "drain is late": ({(ROLLOUT, "drain"): ["late"]}, "rolled_back", (AWAKE, ASLEEP)),
    "dies in drain": ({(ROLLOUT, "drain"): ["dead"]}, "failed", (DEAD, ASLEEP)),
    "drain and wake fail": ({(ROLLOUT, "drain"): ["error"], (ROLLOUT, "wake"): ["hang"]}, "failed", (DEAD, ASLEEP)),
    "sleep fails": ({(ROLLOUT, "sleep"): ["error"]}, "rolled_back", (AWAKE, ASLEEP)),
    "sleep hangs": ({(ROLLOUT, "sleep"): ["hang"]}, "rolled_back", (AWAKE, ASLEEP)),
    "sleep is late": ({(ROLLOUT, "sleep"): ["late"]}, "rolled_back", (AWAKE, ASLEEP)),
    "dies in sleep": ({(ROLLOUT, "sleep"): ["dead"]}, "failed", (DEAD, ASLEEP)),
    "sleep and load fail": ({(ROLLOUT, "sleep"): ["error"], (ROLLOUT, "load"): ["error"]}, "failed", (DEAD, ASLEEP)),
    "target load fails": ({(GENRM, "load"): ["error"]}, "rolled_back", (AWAKE, ASLEEP)),
    "target load hangs": ({(GENRM, "load"): ["hang"]}, "rolled_back", (AWAKE, DEAD)),
    "target load is late": ({(GENRM, "load"): ["late"]}, "rolled_back", (AWAKE, DEAD)),
    "target dies in load": ({(GENRM, "load"): ["dead"]}, "failed", (ASLEEP, DEAD)),
    "target wake fails": ({(GENRM, "wake"): ["error"]}, "rolled_back", (AWAKE, ASLEEP)),
    "target wake hangs": ({(GENRM, "wake"): ["hang"]}, "rolled_back", (AWAKE, DEAD)),
    "target wake is late": ({(GENRM, "wake"): ["late"]}, "rolled_back", (AWAKE, DEAD)),
    "target dies in wake": ({(GENRM, "wake"): ["dead"]}, "failed", (ASLEEP, DEAD)),
    "target neither loads nor sleeps": (
        {(GENRM, "load"): ["error"], (GENRM, "sleep"): ["hang"]},
        "failed",
        (ASLEEP, DEAD),
    ),
    "way back: load fails": ({(GENRM, "load"): ["error"], (ROLLOUT, "load"): ["error"]}, "failed", (DEAD, ASLEEP)),
    "way back: wrong version": ({(GENRM, "wake"): ["error"], (ROLLOUT, "load"): ["wrong"]}, "failed", (DEAD, ASLEEP)),
    "way back: wake dies": ({(GENRM, "wake"): ["hang"], (ROLLOUT, "wake"): ["dead"]}, "failed", (DEAD, DEAD)),
    "not even killed": (
        {(GENRM, "load"): ["error"], (GENRM, "sleep"): ["error"], (GENRM, "kill"): ["hang"]},
        "failed",
        (ASLEEP, UNSETTLED),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rollout_to_genrm(case: str) -> None:
    script, expected, engines = CASES[case]
    result = shift_under(script)
    world, slot = result.world, result.world.table[0]
    assert (result.outcome.outcome, states(world)) == (expected, engines)
    assert not world.violations
    assert [s.ended for s in result.sequences] == [1] * 6
    assert (result.outcome.error is None) == (expected == "done")
    admitted = [role for role in (ROLLOUT, GENRM) if 0 in world.admissions[role].admitted]
    assert admitted == {"done": [GENRM], "rolled_back": [ROLLOUT], "failed": []}[expected]
    status = SlotStatus.FAILED if expected == "failed" else SlotStatus.SERVING
    assert (slot.status, slot.role) == (status, GENRM if expected == "done" else ROLLOUT)


def test_one_shift_event_tells_all() -> None:
    result = shift_under({})
    (event,) = result.world.events.of("shift")
    assert missing_fields(event) == []
    named = {k: event[k] for k in ("slot", "source", "target", "outcome", "reason", "gain", "cost", "error", "aborted")}
    assert named == {
        "slot": 0,
        "source": "rollout",
        "target": "genrm",
        "outcome": "done",
        "reason": "because",
        "gain": 3.0,
        "cost": 1.0,
        "error": None,
        "aborted": 3,
    }
    assert [round(event[f"{step}_s"], 6) for step in ("drain", "sleep", "load", "wake")] == [0.01] * 4
    assert event["duration_s"] == pytest.approx(0.04)
    assert result.world.events.of("served")[-1] == {
        "t_s": 0.0,
        "kind": "served",
        "slot": 0,
        "role": "genrm",
        "version": 0,
    }


def test_a_failed_shift_says_what_went_wrong_each_time() -> None:
    result = shift_under({(GENRM, "wake"): ["hang"], (ROLLOUT, "load"): ["wrong"]})
    (event,) = result.world.events.of("shift")
    assert "slot 0 genrm: wake exceeded its deadline of 2 s (trainer.resource_shift.shift.wake_s)" in event["error"]
    assert "way back: slot 0 rollout: asked to load version 0, reports 100" in event["error"]


TRAIN_CASES: dict[str, tuple[Role, Role, Script, str, Role, EngineState]] = {
    "to train": (ROLLOUT, TRAIN, {}, "done", TRAIN, ASLEEP),
    "to train, sleep fails": (ROLLOUT, TRAIN, {(ROLLOUT, "sleep"): ["hang"]}, "rolled_back", ROLLOUT, AWAKE),
    "to train, dies": (ROLLOUT, TRAIN, {(ROLLOUT, "sleep"): ["dead"]}, "failed", ROLLOUT, DEAD),
    "from train": (TRAIN, ROLLOUT, {}, "done", ROLLOUT, AWAKE),
    "from train, load fails": (TRAIN, ROLLOUT, {(ROLLOUT, "load"): ["error"]}, "rolled_back", TRAIN, ASLEEP),
    "from train, load hangs": (TRAIN, ROLLOUT, {(ROLLOUT, "load"): ["hang"]}, "rolled_back", TRAIN, DEAD),
    "from train, wrong version": (TRAIN, ROLLOUT, {(ROLLOUT, "load"): ["wrong"]}, "rolled_back", TRAIN, ASLEEP),
    "from train, stuck": (
        TRAIN,
        ROLLOUT,
        {(ROLLOUT, "load"): ["error"], (ROLLOUT, "sleep"): ["error"]},
        "failed",
        TRAIN,
        DEAD,
    ),
}


@pytest.mark.parametrize("case", TRAIN_CASES)
def test_shifts_of_training(case: str) -> None:
    source, target, script, expected, role, engine = TRAIN_CASES[case]
    result = shift_under(script, source, target)
    slot = result.world.table[0]
    assert (result.outcome.outcome, slot.role, slot.engines[ROLLOUT]) == (expected, role, engine)
    assert slot.is_free_for_training == (engine is not AWAKE)
    assert not result.world.violations
    assert [s.ended for s in result.sequences] == [1] * 6


def test_an_engine_that_died_asleep_is_restarted_by_the_shift_that_needs_it() -> None:
    async def main(loop: VirtualLoop) -> World:
        world = World([(ROLLOUT, ALL_ROLES)], loop)
        await bring_up(world.table[0], ports_of(world))
        world.engines[0, GENRM].die()
        world.table[0].set_engine(GENRM, DEAD)
        world.table[0].begin_shift(GENRM)
        outcome = await run_shift(world.table[0], Shift(0, ROLLOUT, GENRM, 0, 0, ""), ports_of(world))
        assert outcome.outcome == "done"
        return world

    assert run_virtual(main).engines[0, GENRM].calls == ["restart", "load", "wake"]


def publish_during(operation: str, times: int) -> tuple[World, ShiftOutcome]:
    """Bring up a rollout slot while a newer version is published during its first ``times`` calls."""

    async def main(loop: VirtualLoop) -> tuple[World, ShiftOutcome]:
        world = World([(ROLLOUT, ALL_ROLES)], loop)
        left = times

        def publish(engine: object, name: str) -> str:
            nonlocal left
            if name == operation and left > 0:
                left -= 1
                world.published += 1
            return "ok"

        world.faults = publish
        return world, await bring_up(world.table[0], ports_of(world))

    return run_virtual(main)


@pytest.mark.parametrize("operation", ["load", "wake"])
def test_a_version_published_meanwhile_is_loaded_before_admission(operation: str) -> None:
    world, outcome = publish_during(operation, 1)
    assert (outcome.outcome, outcome.version, world.published) == ("done", 1, 1)
    assert world.engines[0, ROLLOUT].calls == ["load", "wake", "load", "wake"]


def test_an_ever_moving_version_ends_in_an_error() -> None:
    world, outcome = publish_during("load", 10)
    assert outcome.outcome == "failed"
    assert "moved on during each of 5 loads; loaded 4, published 5" in str(outcome.error)
    assert not world.admissions[ROLLOUT].admitted


def test_an_undrained_engine_with_replaced_weights_does_not_serve_on() -> None:
    """It may still run sequences, so it cannot load; its weights are old, so it cannot serve."""

    async def main(loop: VirtualLoop) -> None:
        world = World([(ROLLOUT, ALL_ROLES)], loop)
        await bring_up(world.table[0], ports_of(world))
        world.engines[0, ROLLOUT].script["drain"].append("error")
        world.table[0].begin_shift(GENRM)
        world.published = 1
        outcome = await run_shift(world.table[0], Shift(0, ROLLOUT, GENRM, 0, 0, ""), ports_of(world))
        assert outcome.outcome == "failed"
        assert "serves version 0, but 1 is published" in str(outcome.error)
        assert not world.violations

    run_virtual(main)


@pytest.mark.parametrize(
    ("operation", "fault", "expected"),
    [
        ("drain", "ok", "done"),
        ("drain", "error", "failed"),
        ("load", "wrong", "failed"),
        ("load", "hang", "failed"),
        ("wake", "dead", "failed"),
    ],
)
def test_new_weights_are_taken_or_the_slot_fails(operation: str, fault: str, expected: str) -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World([(ROLLOUT, ALL_ROLES)], loop)
        await bring_up(world.table[0], ports_of(world))
        world.published = world.required = 1
        world.engines[0, ROLLOUT].script[operation].append(fault)
        world.table[0].begin_refresh()
        outcome = await refresh(world.table[0], ports_of(world))
        assert (outcome.outcome, outcome.version) == (expected, 1 if expected == "done" else None)
        assert (0 in world.admissions[ROLLOUT].admitted) == (expected == "done")
        assert world.table[0].engines[ROLLOUT] is (AWAKE if expected == "done" else DEAD)
        assert not world.violations

    run_virtual(main)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.015, 0.025, 0.035])
def test_a_cancelled_shift_leaves_the_slot_failed_and_masked(after_s: float) -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World([(ROLLOUT, ALL_ROLES)], loop)
        await bring_up(world.table[0], ports_of(world))
        world.table[0].begin_shift(GENRM)
        task = asyncio.ensure_future(run_shift(world.table[0], Shift(0, ROLLOUT, GENRM, 0, 0, ""), ports_of(world)))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        world.table.check()
        if after_s > 0:  # a task that is cancelled before it began does nothing at all
            assert world.table[0].failure == "cancelled"
            assert world.events.of("shift")[0]["outcome"] == "cancelled"
            assert not any(admission.admitted for admission in world.admissions.values())

    run_virtual(main)


def test_a_deadline_holds_although_the_operation_ignores_it() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(7.0)
                return
            except asyncio.CancelledError:
                continue

    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(StepTimeout, match=r"it exceeded its deadline of 2 s \(trainer.resource_shift.x\)"):
            await within(2.0, "it", "x", stubborn())
        waited_s = loop.time()
        await asyncio.sleep(10.0)
        return waited_s

    assert run_virtual(main) == pytest.approx(7.0)


def test_cancelling_waits_for_the_operation_to_end() -> None:
    ended: list[str] = []

    async def tidy() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            await asyncio.sleep(1.0)
            ended.append("operation")

    async def main(loop: VirtualLoop) -> None:
        step = asyncio.ensure_future(within(50.0, "it", None, tidy()))
        await asyncio.sleep(1.0)
        step.cancel()
        await asyncio.wait({step})
        ended.append("step")
        assert step.cancelled()

    run_virtual(main)
    assert ended == ["operation", "step"]


def test_a_slot_that_was_not_begun_is_not_touched() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World([(ROLLOUT, ALL_ROLES)], loop)
        with pytest.raises(SlotError, match="begin_shift refused"):
            world.table[0].begin_shift(GENRM)
        assert world.engines[0, ROLLOUT].calls == []

    run_virtual(main)
