"""Whole runs at random: slots, planner, demand, leases, publishes, faults and deaths all follow from a seed.

However it goes: every sequence ends once, the trainer gets its lease and its publishes, no two engines of a slot hold
memory together or while training runs, nothing is served under another version than recorded or required, and no task
stays. A run that could not go on would end in "deadlock" or at the virtual time limit.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import random
from collections.abc import Callable

import pytest
from fakes import FakeEngine, RandomPlanner, Sequence, VirtualLoop, World, quick_config, run_virtual

from verl_pivot.core.plan import Planner
from verl_pivot.core.registry import PlannerSettings, make_planner
from verl_pivot.core.snapshot import Role
from verl_pivot.observe.kinds import missing_fields
from verl_pivot.runtime.controller import Controller

ROLLOUT, GENRM, TRAIN = Role.ROLLOUT, Role.GENRM, Role.TRAIN
STEPS = 5
HEALTHY_AFTER_FAULT = 8
"""Operations a slot is spared after a fault: three faults in a row would end it for good, which is another test."""


class Run:
    """One seeded run: a trainer that asks for rollouts, has each judged, trains, publishes, and asks for more."""

    def __init__(self, seed: int, loop: VirtualLoop, planner: str = "random") -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.staleness = self.rng.choice([0, 0, 1])
        self.world = World(self._hosts(), loop)
        self.fault_rate = self.rng.choice([0.0, 0.02, 0.06])
        self.spared: dict[int, int] = {}
        self.sequences: list[Sequence] = []
        self.finished = asyncio.Event()
        self.open = 0
        for engine in self.world.engines.values():
            engine.delay_s = lambda: self.rng.uniform(0.0, 0.8)
        self.controller = Controller(
            self.world.table,
            self.world.engines,
            self.world.admissions,
            self._planner(planner),
            quick_config(staleness=self.staleness),
            self.world.events,
            loop,
        )

    def _planner(self, name: str) -> Planner:
        if name == "random":
            return RandomPlanner(self.rng, self.rng.choice([0.02, 0.1, 0.3]))
        return make_planner(name, PlannerSettings(name=name, cooldown_s=1.0, immunity_s=1.0, window_s=10.0))

    def _hosts(self) -> list[tuple[Role, frozenset[Role]]]:
        """One slot for each inference role that stays, so that someone is always there; the others at random."""
        hosts = [(ROLLOUT, frozenset({ROLLOUT})), (GENRM, frozenset({GENRM})), (TRAIN, frozenset(Role))]
        for _ in range(self.rng.randint(0, 4)):
            kinds = [frozenset(Role), frozenset({ROLLOUT, GENRM}), frozenset({ROLLOUT, TRAIN})]
            can_host = self.rng.choice(kinds)
            hosts.append((self.rng.choice(sorted(can_host)), can_host))
        return hosts

    def fault(self, engine: FakeEngine, operation: str) -> str:
        left = self.spared.get(engine.slot_id, 0)
        if left > 0 and operation != "stats":
            self.spared[engine.slot_id] = left - 1
        if left > 0 or self.rng.random() >= self.fault_rate / (10 if operation == "stats" else 1):
            return "ok"
        self.spared[engine.slot_id] = HEALTHY_AFTER_FAULT
        faults = ["error", "hang", "late"]
        if operation not in ("kill", "restart"):
            faults.append("dead")
        if operation == "load":
            faults.append("wrong")
        return self.rng.choice(faults)

    # The trainer

    def submit_batch(self) -> None:
        for _ in range(self.rng.randint(1, 12)):
            self._submit(ROLLOUT, lambda: self._submit(GENRM, self._judged))

    def _submit(self, role: Role, on_end: Callable[[], None]) -> None:
        if role is ROLLOUT:
            self.open += 1
        sequence = Sequence(f"{role}{len(self.sequences)}", self.rng.uniform(0.1, 6.0), on_end)
        self.sequences.append(sequence)
        self.world.admissions[role].submit(sequence)

    def _judged(self) -> None:
        self.open -= 1
        self.finished.set()

    async def _batch_is_done(self) -> None:
        allowed = 0 if self.staleness == 0 else 6
        while self.open > allowed:
            self.finished.clear()
            await self.finished.wait()
            self.controller.train_progress(0, 4)

    async def train(self) -> None:
        for step in range(1, STEPS + 1):
            self.submit_batch()
            await self._batch_is_done()
            await self._acquire()
            self.world.check_training_memory()
            self.world.is_training = True
            await asyncio.sleep(self.rng.uniform(0.0, 5.0))
            if self.rng.random() < 0.5:
                await self._publish(step)
                self.world.is_training = False
                await self.controller.release_train()
            else:
                self.world.is_training = False
                await self.controller.release_train()
                await self._publish(step)
        while self.open:
            self.finished.clear()
            await self.finished.wait()

    async def _acquire(self) -> None:
        while self.rng.random() < 0.3:  # changes its mind first
            claim = asyncio.ensure_future(self.controller.acquire_train(4, 4))
            await asyncio.sleep(self.rng.choice([0.0, 0.05, 0.5]))
            claim.cancel()
            await asyncio.wait({claim})
            if not claim.cancelled():
                return claim.result() and None
        await self.controller.acquire_train(4, 4)

    async def _publish(self, version: int) -> None:
        self.world.published = version
        served = await self.controller.publish(version)
        assert set(served.values()) <= {version}
        self.world.required = version

    async def disturb(self) -> None:
        """Engines die or freeze out of nowhere; some deaths are reported, some are found."""
        while True:
            await asyncio.sleep(self.rng.expovariate(0.05) + 1.0)
            engine = self.rng.choice(list(self.world.engines.values()))
            if self.fault_rate == 0.0 or self.spared.get(engine.slot_id, 0) > 0 or not engine.is_alive:
                continue
            self.spared[engine.slot_id] = HEALTHY_AFTER_FAULT
            if self.rng.random() < 0.3:
                engine.freeze()
                continue
            engine.die()
            match self.rng.choice(["lost", "suspected", "unseen"]):
                case "lost":
                    self.controller.engine_lost(engine.slot_id, engine.role, "reported")
                case "suspected":
                    await self.controller.examine(engine.slot_id, engine.role, "reported")

    async def watch(self) -> None:
        """The slots' own record must be sound at every moment it can be looked at."""
        while True:
            self.world.table.check()
            await asyncio.sleep(0.1)


async def whole_run(run: Run) -> Run:
    await run.controller.start()
    run.world.faults = run.fault
    helpers = [asyncio.ensure_future(work) for work in (run.disturb(), run.watch())]
    await run.train()
    for helper in helpers:
        helper.cancel()
    await asyncio.wait(helpers)
    assert all(helper.cancelled() for helper in helpers)
    await run.controller.stop()
    return run


def check(run: Run) -> None:
    assert run.world.violations == []
    assert [(s.name, s.ended) for s in run.sequences if s.ended != 1] == []
    assert run.controller.status()["error"] is None
    assert [event for event in run.world.events.all if missing_fields(event)] == []


@functools.cache
def run_of(seed: int, planner: str) -> Run:
    return run_virtual(lambda loop: whole_run(Run(seed, loop, planner)))


SEEDS = range(16)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_at_random_keeps_every_promise(seed: int) -> None:
    check(run_of(seed, "random"))


@pytest.mark.parametrize("planner", ["harmonic", "static"])
@pytest.mark.parametrize("seed", range(3))
def test_the_real_planners_under_the_same_storm(planner: str, seed: int) -> None:
    check(run_of(1000 + seed, planner))


def test_the_storm_is_one() -> None:
    """The random runs together reach what they are meant to reach."""
    kinds: collections.Counter[str] = collections.Counter()
    for seed in SEEDS:
        run = run_of(seed, "random")
        kinds["moves"] += sum(sequence.moves for sequence in run.sequences)
        for event in run.world.events.all:
            kinds[f"{event['kind']} {event['outcome']}" if event["kind"] == "shift" else event["kind"]] += 1
    for kind in ("shift done", "shift rolled_back", "shift failed", "slot_failed", "slot_recovered", "lease", "moves"):
        assert kinds[kind] >= 5, kinds
