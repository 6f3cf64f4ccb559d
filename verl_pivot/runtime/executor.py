"""Carrying out what was decided: shifts, first roles, new weights, and what follows from a lost engine.

Every piece of work on a slot is one background task that leaves the slot serving or failed; a failed slot recovers in
a background task of its own. Owned by the controller, in its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from verl_pivot.core.costs import ShiftCosts, ShiftCostTracker
from verl_pivot.core.plan import Shift
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus
from verl_pivot.runtime.lease import Lease
from verl_pivot.runtime.ports import EngineDead, EngineError
from verl_pivot.runtime.recovery import Recovery
from verl_pivot.runtime.shift import DONE, bring_up, refresh, run_shift
from verl_pivot.runtime.slots import EngineState, Slot, SlotError, SlotTable
from verl_pivot.runtime.snapshots import LostEngine
from verl_pivot.runtime.steps import ShiftPorts, within
from verl_pivot.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

WAKE_AT_ONCE = 4
"""Engines woken side by side at the start: each reads all its weights."""


class Executor:
    """Works on slots. ``on_change`` is called after every change that a plan or the lease may care about."""

    def __init__(
        self, table: SlotTable, ports: ShiftPorts, lease: Lease, tasks: TaskSet, on_change: Callable[[], None]
    ) -> None:
        self._table, self._ports, self._lease, self._tasks = table, ports, lease, tasks
        self._notify = on_change
        self._recovery = Recovery(ports, lease, self._changed)
        self._costs = ShiftCostTracker()
        self.last_shift_s: float | None = None
        self.given_up: dict[int, str] = {}
        """Slots that stay failed for the rest of the run, with the reason."""

    def costs(self) -> ShiftCosts:
        """What shifts took so far."""
        return self._costs.costs()

    def add_migration(self, seconds: float) -> None:
        """What a sequence waited for its first token: the price of moving one."""
        self._costs.add_migration(seconds)

    def begin(self, shift: Shift) -> None:
        """Start one shift of a plan. Raises SlotError when the plan does not fit the slot or the lease."""
        slot = self._table[shift.slot_id]
        if shift.source is not slot.role:
            raise SlotError(f"{slot.describe()}: the plan takes it for {shift.source}")
        if slot.role is Role.TRAIN and self._lease.state is not LeaseState.FREE:
            state = self._lease.state
            raise SlotError(f"{slot.describe()}: the plan shifts it to {shift.target}, but the lease is {state}")
        slot.begin_shift(shift.target)
        self.last_shift_s = self._ports.clock.now_s()
        self._tasks.spawn(self._shift(slot, shift))

    async def bring_up_all(self) -> None:
        """Every slot into its first role; those that do not come up are failed and recover in the background."""
        limit = asyncio.Semaphore(WAKE_AT_ONCE)
        await self._all(self._bring_up(slot, limit) for slot in self._table.values())

    async def serve_version(self, version: int, at_once: int) -> None:
        """Make the rollout engines that serve another version load ``version``, ``at_once`` of them at a time."""
        stale = [s for s in self._table.serving(Role.ROLLOUT) if s.versions[Role.ROLLOUT] != version]
        limit = asyncio.Semaphore(at_once)
        await self._all(self._refresh(slot, version, limit) for slot in stale)

    def lose(self, lost: LostEngine) -> None:
        """An engine is gone, or silent. A slot that serves with it fails; an engine that was asleep is restarted
        when a shift needs it; a shift that is at work on it finds out by itself."""
        slot, role = lost.slot, lost.role
        if slot.is_serving(role):
            self.mask(slot)
            slot.fail(lost.error)
            self._settle(slot)
        elif lost.is_dead and slot.engines.get(role) is EngineState.ASLEEP:
            slot.set_engine(role, EngineState.DEAD)

    def shed(self, slot: Slot, role: Role, count: int) -> None:
        """Have a slot that serves give up ``count`` sequences to others of its role, in the background."""
        self._tasks.spawn(self._shed(slot, role, count))

    def mask(self, slot: Slot) -> None:
        for role in slot.inference_roles:
            self._ports.admissions[role].mask(slot.slot_id)

    async def _shift(self, slot: Slot, shift: Shift) -> None:
        outcome = await run_shift(slot, shift, self._ports)
        if outcome.outcome == DONE:
            self._costs.add_shift(shift.source, shift.target, outcome.duration_s)
        self._settle(slot)

    async def _shed(self, slot: Slot, role: Role, count: int) -> None:
        what = f"slot {slot.slot_id} {role}: shed"
        work = self._ports.engines[slot.slot_id, role].shed(count)
        try:
            moved = await within(self._ports.deadlines.drain_s, what, "shift.drain_s", work)
        except EngineDead as error:
            self.lose(LostEngine(slot, role, str(error), is_dead=True))
        except EngineError as error:  # nothing depends on it; an engine in trouble is noticed by its load reports
            logger.warning("%s", error)
        else:
            self._ports.events.emit("evened", slot=slot.slot_id, role=str(role), moved=moved)

    async def _bring_up(self, slot: Slot, limit: asyncio.Semaphore) -> None:
        async with limit:
            await bring_up(slot, self._ports)
        self._settle(slot)

    async def _refresh(self, slot: Slot, version: int, limit: asyncio.Semaphore) -> None:
        async with limit:
            # Its turn may come late: it has left the role, or came back to it with the new version.
            if not slot.is_serving(Role.ROLLOUT) or slot.versions[Role.ROLLOUT] == version:
                return
            slot.begin_refresh()
            await refresh(slot, self._ports)
        self._settle(slot)

    async def _all(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        await self._tasks.settle([self._tasks.spawn(work) for work in works])

    def _settle(self, slot: Slot) -> None:
        """A slot's transition ended. Every slot that failed passes here once, and recovers in the background."""
        if slot.status is SlotStatus.FAILED:
            logger.warning("slot %d failed: %s", slot.slot_id, slot.failure)
            self._ports.events.emit("slot_failed", slot=slot.slot_id, role=str(slot.role), error=slot.failure)
            self._tasks.spawn(self._recover(slot))
        self._changed()

    async def _recover(self, slot: Slot) -> None:
        problem = await self._recovery.run(slot)
        if problem is None:
            self._ports.events.emit("slot_recovered", slot=slot.slot_id, role=str(slot.role))
        else:
            logger.error("slot %d stays failed: %s", slot.slot_id, problem)
            self.given_up[slot.slot_id] = problem
        self._changed()

    def _changed(self) -> None:
        self._lease.poke()
        self._notify()
