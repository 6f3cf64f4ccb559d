"""A small world to run the controller in: virtual time, engines with scripted faults, admission with a real queue.

Everything that must never happen is recorded in ``World.violations`` at the moment it happens.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from verl_pivot.config.schema import ResourceShiftConfig, ShiftConfig
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.sequences import SequenceEnd, SequenceReport, SequenceState
from verl_pivot.core.snapshot import LeaseState, ReplicaLoad, Role, SlotStatus, Snapshot
from verl_pivot.runtime.ports import EngineDead, EngineError
from verl_pivot.runtime.slots import Slot, SlotTable

T = TypeVar("T")
ALL_ROLES = frozenset(Role)


class _InstantSelector(selectors.SelectSelector):
    """Never sleeps: waiting moves the loop's clock. With nothing to wait for, nothing can ever happen: a deadlock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and no timer runs")
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _InstantSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    now_s = time


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], limit_s: float = 20_000.0) -> T:
    """Run ``main(loop)`` in virtual time; the loop is also the clock. Fails when a task is left behind."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(asyncio.wait_for(main(loop), limit_s))
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"tasks left behind: {left}"
        return result
    finally:
        loop.close()


class Events:
    """Event sink that remembers."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.all.append({"t_s": 0.0, "kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.all if event["kind"] == kind]


class Sequence:
    """A request: needs ``work_s`` seconds of engine time in all, keeps its progress when it moves, ends once."""

    def __init__(self, name: str, work_s: float, on_end: Callable[[], None]) -> None:
        self.name = name
        self.left_s = work_s
        self.ended = 0
        self.moves = 0
        self.versions: list[int | None] = []
        self._on_end = on_end

    def end(self) -> None:
        self.ended += 1
        self._on_end()


class FakeEngine:
    """Implements ``EnginePort``.

    ``script``: operation -> behaviours, one a call: ``error`` (raises, nothing done), ``hang`` (no answer, nothing
    done), ``late`` (done, no answer), ``dead`` (the process dies), ``wrong`` (loads another version), ``ok``.
    """

    def __init__(self, slot_id: int, role: Role, world: World) -> None:
        self.slot_id, self.role, self._world = slot_id, role, world
        self.is_alive, self.is_open, self.is_frozen = True, False, False
        self.holds_memory = False
        self.version: int | None = None
        self.running: dict[Sequence, tuple[asyncio.TimerHandle | None, float]] = {}
        self._told: tuple[SequenceState, ...] = ()
        self._ended: list[SequenceEnd] = []
        self.script: dict[str, deque[str]] = defaultdict(deque)
        self.calls: list[str] = []
        self.delay_s: Callable[[], float] = lambda: 0.01

    # EnginePort

    async def drain(self) -> int:
        return await self._operate("drain", self._abort_all)

    async def sleep(self) -> None:
        await self._operate("sleep", self._free)

    async def load(self, version: int | None) -> int:
        wanted = self._world.newest(self.role) if version is None else version
        if self.running:
            self._world.violation(f"{self} loads {wanted} while {len(self.running)} sequences run")
        return await self._operate("load", lambda: self._take_weights(wanted), begin=self._hold)

    async def wake(self) -> None:
        await self._operate("wake", self._open, begin=self._hold)

    async def shed(self, count: int) -> int:
        return await self._operate("shed", lambda: self._abort(list(self.running)[:count]))

    async def stats(self) -> ReplicaLoad:
        await self._operate("stats", lambda: None)
        n = len(self.running)
        self._told = tuple(SequenceState(s.name, "", 10, 90) for s in self.running)
        return ReplicaLoad(n, 0, 100 * n, 50.0 if n else 0.0)

    def sequences(self) -> SequenceReport:
        ended, self._ended = tuple(self._ended), []
        return SequenceReport(self._told, ended)

    async def kill(self) -> None:
        await self._operate("kill", self.die, even_dead=True)

    async def restart(self) -> None:
        await self._operate("restart", self._reborn, begin=self._start, even_dead=True)

    # What happens to it

    def accept(self, sequence: Sequence) -> None:
        if not self.is_open:
            self._world.violation(f"{self} gets {sequence.name} while closed")
        self._world.check_served(self)
        sequence.versions.append(self.version)
        loop = asyncio.get_running_loop()
        timer = None if self.is_frozen else loop.call_later(sequence.left_s, self._finish, sequence)
        self.running[sequence] = (timer, loop.time())

    def die(self) -> None:
        self.is_alive = self.is_open = self.is_frozen = self.holds_memory = False
        self.version = None
        self._abort_all()

    def freeze(self) -> None:
        """The process stays, nothing moves any more."""
        self.is_frozen = True
        for sequence, (timer, since_s) in self.running.items():
            if timer is not None:
                timer.cancel()
            self.running[sequence] = (None, since_s)

    async def _operate(
        self, name: str, effect: Callable[[], T], begin: Callable[[], None] = lambda: None, even_dead: bool = False
    ) -> T:
        self.calls.append(name)
        fault = self.script[name].popleft() if self.script[name] else self._world.fault(self, name)
        if fault == "dead":
            self.die()
        if not self.is_alive and not even_dead:
            raise EngineDead(f"{self}: {name}: process gone")
        begin()
        await asyncio.sleep(self.delay_s())
        if not self.is_alive and not even_dead:
            raise EngineDead(f"{self}: {name}: process gone")
        if fault == "error":
            raise EngineError(f"{self}: {name} failed")
        if fault == "hang" or (self.is_frozen and name != "kill"):
            await asyncio.Event().wait()
        result = effect()
        if fault == "late":
            await asyncio.Event().wait()
        if fault == "wrong":
            assert isinstance(self.version, int) and isinstance(result, int)
            self.version = result = self.version + 100  # type: ignore[assignment]
        return result

    def _abort_all(self) -> int:
        self.is_open = False
        return self._abort(list(self.running))

    def _abort(self, sequences: list[Sequence]) -> int:
        for sequence in sequences:
            timer, since_s = self.running.pop(sequence)
            if timer is not None:
                timer.cancel()
                sequence.left_s -= min(sequence.left_s, asyncio.get_running_loop().time() - since_s)
            sequence.moves += 1
            self._ended.append(SequenceEnd(sequence.name, "", 10, 90, False))
            self._world.admissions[self.role].requeue(sequence)
        return len(sequences)

    def _free(self) -> None:
        if self.running:
            self._world.violation(f"{self} sleeps while {len(self.running)} sequences run")
        self.holds_memory = self.is_open = False
        self.version = None

    def _hold(self) -> None:
        self.holds_memory = True
        self._world.check_memory(self)

    def _take_weights(self, version: int) -> int:
        self.version = version
        return version

    def _open(self) -> None:
        if self.version is None:
            self._world.violation(f"{self} wakes without weights")
        self.is_open = True

    def _start(self) -> None:
        if not self.is_alive:
            self._hold()

    def _reborn(self) -> None:
        if not self.is_alive:
            self.is_alive, self.holds_memory, self.version = True, False, None

    def _finish(self, sequence: Sequence) -> None:
        del self.running[sequence]
        sequence.end()
        self._ended.append(SequenceEnd(sequence.name, "", 10, 100, True))
        self._world.admissions[self.role].dispatch()

    def __repr__(self) -> str:
        return f"slot {self.slot_id} {self.role} engine"


class FakeAdmission:
    """Implements ``AdmissionPort``: a queue, and the admitted slot with the fewest sequences gets the next one."""

    def __init__(self, role: Role, world: World) -> None:
        self._role, self._world = role, world
        self.admitted: set[int] = set()
        self.waiting: deque[Sequence] = deque()

    def mask(self, slot_id: int) -> None:
        self.admitted.discard(slot_id)

    def admit(self, slot_id: int) -> None:
        self.admitted.add(slot_id)
        self.dispatch()

    def queued(self) -> int:
        return len(self.waiting)

    def queued_sequences(self) -> list[SequenceState]:
        return [SequenceState(sequence.name, "", 10, 90 if sequence.moves else 0) for sequence in self.waiting]

    def inflight(self) -> Mapping[int, int]:
        return {slot_id: len(engine.running) for (slot_id, role), engine in self._world.engines.items()
                if role is self._role}  # fmt: skip

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.dispatch()

    def requeue(self, sequence: Sequence) -> None:
        """Its client got an abort or an error and asks again."""
        self.waiting.append(sequence)
        asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        while self.waiting:
            engines = [self._world.engines[slot_id, self._role] for slot_id in self.admitted]
            engines = [engine for engine in engines if engine.is_alive and len(engine.running) < 4]
            if not engines:
                return
            min(engines, key=lambda e: (len(e.running), e.slot_id)).accept(self.waiting.popleft())


class World:
    """Slots, engines and admissions that belong together, and the rules they must keep."""

    def __init__(self, hosts: list[tuple[Role, frozenset[Role]]], clock: VirtualLoop) -> None:
        self.clock = clock
        self.events = Events()
        self.violations: list[str] = []
        self.table = SlotTable([Slot(i, first, can_host) for i, (first, can_host) in enumerate(hosts)])
        self.engines = {
            (slot.slot_id, role): FakeEngine(slot.slot_id, role, self)
            for slot in self.table.values()
            for role in slot.inference_roles
        }
        self.admissions = {role: FakeAdmission(role, self) for role in (Role.ROLLOUT, Role.GENRM)}
        self.published = 0
        """Newest version in the store."""
        self.required = 0
        """Version that every newly served sequence must have at least."""
        self.is_training = False
        self.faults: Callable[[FakeEngine, str], str] = lambda engine, name: "ok"

    def fault(self, engine: FakeEngine, name: str) -> str:
        return self.faults(engine, name)

    def newest(self, role: Role) -> int:
        return self.published if role is Role.ROLLOUT else 0

    def violation(self, text: str) -> None:
        self.violations.append(f"{self.clock.time():.2f} s: {text}")

    def check_memory(self, engine: FakeEngine) -> None:
        slot = self.table[engine.slot_id]
        others = [o for r in slot.inference_roles if (o := self.engines[slot.slot_id, r]) is not engine]
        if any(other.holds_memory for other in others):
            self.violation(f"{engine} takes memory that {others} holds")
        if self.is_training and Role.TRAIN in slot.can_host:
            self.violation(f"{engine} takes memory while training runs")

    def check_training_memory(self) -> None:
        for (slot_id, _), engine in self.engines.items():
            if Role.TRAIN in self.table[slot_id].can_host and engine.holds_memory:
                self.violation(f"training begins while {engine} holds memory")

    def check_served(self, engine: FakeEngine) -> None:
        recorded = self.table[engine.slot_id].versions[engine.role]
        if engine.version is None or engine.version != recorded:
            self.violation(f"{engine} serves version {engine.version}, recorded is {recorded}")
        elif engine.role is Role.ROLLOUT and engine.version < self.required:
            self.violation(f"{engine} serves version {engine.version}, {self.required} is required")


class RandomPlanner:
    """Does what a plan may do, at random: frees slots for the lease, lends train slots, moves others about."""

    name = "random"

    def __init__(self, rng: random.Random, restlessness: float = 0.2) -> None:
        self._rng, self._restlessness = rng, restlessness

    def plan(self, snapshot: Snapshot) -> Plan:
        shifts = []
        lease = snapshot.train.lease
        for view in snapshot.slots:
            if view.status is not SlotStatus.SERVING:
                continue
            target: Role | None = None
            inference = [r for r in (Role.ROLLOUT, Role.GENRM) if r in view.can_host and r is not view.role]
            if Role.TRAIN in view.can_host and lease is not LeaseState.FREE:
                target = Role.TRAIN
            elif inference and self._rng.random() < self._restlessness:
                target = self._rng.choice(inference)
            if target is not None and target is not view.role:
                shifts.append(Shift(view.slot_id, view.role, target, 1.0, 0.5, "at random"))
        return Plan(tuple(shifts), f"{len(shifts)} at random")


class StillPlanner:
    """Never moves anything but what it was told to: ``wanted`` maps slot to role."""

    name = "still"

    def __init__(self) -> None:
        self.wanted: dict[int, Role] = {}

    def plan(self, snapshot: Snapshot) -> Plan:
        shifts = tuple(
            Shift(v.slot_id, v.role, self.wanted[v.slot_id], 1.0, 0.5, "told to")
            for v in snapshot.slots
            if v.status is SlotStatus.SERVING and self.wanted.get(v.slot_id, v.role) is not v.role
        )
        return Plan(shifts, "told to")


def quick_config(**changes: Any) -> ResourceShiftConfig:
    """Deadlines of seconds; virtual time makes them free."""
    config = ResourceShiftConfig(**changes)
    config.shift = ShiftConfig(drain_s=2.0, sleep_s=2.0, load_s=3.0, wake_s=2.0, restart_s=5.0)
    config.train.lease_deadline_s = 300.0
    return config
