"""The steps that a shift is made of: drain, sleep, load, wake, restart, kill, each under its own deadline.

They keep the slot's record of its engines true whatever happens: before a step that changes an engine's memory the
engine counts as unsettled, after it as what the engine acknowledged, and as dead once it was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from verl_pivot.config.schema import ShiftConfig
from verl_pivot.core.snapshot import Role
from verl_pivot.runtime.ports import AdmissionPort, Clock, EngineDead, EngineError, EnginePort, EventSink
from verl_pivot.runtime.slots import EngineState, Slot

T = TypeVar("T")

MAX_LOADS = 5
"""Loads in one step while the published version keeps moving; a publish takes longer than a load."""
CANCEL_GRACE_S = 5.0
"""How long a late operation gets to notice that it was cancelled before the next step starts."""


class StepTimeout(EngineError):
    """A step exceeded its deadline; the message names slot, role, step, deadline and the option that sets it."""


@dataclass(frozen=True)
class ShiftPorts:
    """What a shift acts through."""

    engines: Mapping[tuple[int, Role], EnginePort]
    admissions: Mapping[Role, AdmissionPort]
    clock: Clock
    deadlines: ShiftConfig
    version_of: Callable[[Role], int | None]
    """The version an engine of a role must serve now; None: whatever its own newest is."""
    events: EventSink


@dataclass
class ShiftOutcome:
    """How a shift went. Times are seconds; steps that were repeated (rollback) add up."""

    slot_id: int
    source: Role
    target: Role
    t_start_s: float
    outcome: str = "failed"
    """``done``, ``rolled_back``, ``failed``, or ``cancelled`` when the run ended meanwhile."""
    duration_s: float = 0.0
    steps_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("drain", "sleep", "load", "wake"), 0.0))
    aborted: int = 0
    """Sequences that had to go elsewhere."""
    version: int | None = None
    """What the engine that serves in the end reported; None when the slot trains or failed."""
    error: str | None = None


async def within(limit_s: float, what: str, option: str | None, work: Awaitable[T]) -> T:
    """Result of ``work``, or StepTimeout after ``limit_s``; ``option`` is the setting that holds the limit.

    The deadline holds even when ``work`` does not react to being cancelled. Cancelled from outside, it cancels
    ``work`` and waits for its end as long.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_retrieve)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        raise
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    setting = f" (trainer.resource_shift.{option})" if option else ""
    raise StepTimeout(f"{what} exceeded its deadline of {limit_s:g} s{setting}")


def _retrieve(task: asyncio.Future[T]) -> None:
    """An abandoned task's error was reported as a timeout already."""
    if not task.cancelled():
        task.exception()


class Steps:
    """The steps on one slot, timed into an outcome; keeps the slot's engine states true."""

    def __init__(self, slot: Slot, outcome: ShiftOutcome, ports: ShiftPorts) -> None:
        self._slot = slot
        self._outcome = outcome
        self._ports = ports
        self._limits = ports.deadlines

    def mask(self) -> None:
        for role in self._slot.inference_roles:
            self._ports.admissions[role].mask(self._slot.slot_id)

    async def drain(self, role: Role) -> None:
        self._ports.admissions[role].mask(self._slot.slot_id)
        self._outcome.aborted += await self._step("drain", role, self._limits.drain_s, self._engine(role).drain())

    async def sleep(self, role: Role) -> None:
        self._slot.set_engine(role, EngineState.UNSETTLED)
        await self._step("sleep", role, self._limits.sleep_s, self._engine(role).sleep())
        self._slot.set_engine(role, EngineState.ASLEEP)

    async def restart(self, role: Role) -> None:
        self._slot.set_engine(role, EngineState.UNSETTLED)
        await self._step("restart", role, self._limits.restart_s, self._engine(role).restart())
        self._slot.set_engine(role, EngineState.ASLEEP)

    async def open(self, role: Role) -> None:
        """Load the wanted version, wake, admit. No await lies between the last look at the version and admission, so
        a publish either sees this slot serving or this slot sees the published version."""
        for _ in range(MAX_LOADS):
            wanted = self._ports.version_of(role)
            await self._load(role, wanted)
            await self._wake(role)
            if self._ports.version_of(role) == wanted:
                return self._admit(role)
        raise EngineError(
            f"slot {self._slot.slot_id} {role}: the published version moved on during each of {MAX_LOADS} loads; "
            f"loaded {wanted}, published {self._ports.version_of(role)}"
        )

    async def reopen(self, role: Role) -> None:
        """Let an engine that still is awake (its drain or sleep went wrong) serve on. Its weights must be current:
        it may not be idle, and an engine that runs sequences must not load."""
        wanted, has = self._ports.version_of(role), self._slot.versions[role]
        if wanted is not None and has != wanted:
            raise EngineError(
                f"slot {self._slot.slot_id} {role}: it is not known to be idle and serves version {has}, "
                f"but {wanted} is published"
            )
        await self._wake(role)
        if self._ports.version_of(role) != wanted:
            return await self.reopen(role)
        self._admit(role)

    async def kill(self, role: Role) -> None:
        self._slot.set_engine(role, EngineState.UNSETTLED)
        await self._step("kill", role, self._limits.sleep_s, self._engine(role).kill())
        self._slot.set_engine(role, EngineState.DEAD)

    async def kill_unsettled(self) -> None:
        """Engines that hold memory in an unknown state end here, the processes of a half-dead group included. One
        that cannot be ended stays unsettled."""
        for role, state in list(self._slot.engines.items()):
            if not state.frees_memory:
                try:
                    await self.kill(role)
                except Exception as error:  # the slot has failed already; say so and leave it to its recovery
                    self._outcome.error = f"{self._outcome.error}; {error}"

    async def _load(self, role: Role, wanted: int | None) -> None:
        self._slot.set_engine(role, EngineState.UNSETTLED)
        self._slot.versions[role] = None
        got = await self._step("load", role, self._limits.load_s, self._engine(role).load(wanted))
        if wanted is not None and got != wanted:
            raise EngineError(f"slot {self._slot.slot_id} {role}: asked to load version {wanted}, reports {got}")
        self._slot.versions[role] = got

    async def _wake(self, role: Role) -> None:
        await self._step("wake", role, self._limits.wake_s, self._engine(role).wake())
        self._slot.set_engine(role, EngineState.AWAKE)

    def _admit(self, role: Role) -> None:
        version = self._slot.versions[role]
        self._outcome.version = version
        self._ports.admissions[role].admit(self._slot.slot_id)
        self._ports.events.emit("served", slot=self._slot.slot_id, role=str(role), version=version)

    async def _step(self, name: str, role: Role, limit_s: float, work: Awaitable[T]) -> T:
        what = f"slot {self._slot.slot_id} {role}: {name}"
        option = f"shift.{'sleep' if name == 'kill' else name}_s"
        started_s = self._ports.clock.now_s()
        try:
            return await within(limit_s, what, option, work)
        except EngineDead:
            # Not yet dead in the slot's books: other processes of the same group may live and hold memory.
            self._slot.set_engine(role, EngineState.UNSETTLED)
            raise
        finally:
            if name in self._outcome.steps_s:
                self._outcome.steps_s[name] += self._ports.clock.now_s() - started_s

    def _engine(self, role: Role) -> EnginePort:
        return self._ports.engines[self._slot.slot_id, role]
