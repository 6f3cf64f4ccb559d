"""Bringing a failed slot back: restart its engines, then wake one. Runs as a background task of the controller."""

from __future__ import annotations

from collections.abc import Callable

from verl_pivot.core.snapshot import LeaseState, Role
from verl_pivot.runtime.lease import Lease
from verl_pivot.runtime.shift import DONE, bring_up
from verl_pivot.runtime.slots import EngineState, Slot
from verl_pivot.runtime.steps import ShiftOutcome, ShiftPorts, Steps

ATTEMPTS = 3
"""Restarts before a slot is left failed for the rest of the run."""


class Recovery:
    """Restarts failed slots.

    A starting engine takes memory. On a slot of the train unit it therefore waits until the lease is free, unless
    the slot's memory is not free anyway, when restarting is what frees it and the lease waits for that.

    ``on_change`` is called after an engine of a failed slot changed.
    """

    def __init__(self, ports: ShiftPorts, lease: Lease, on_change: Callable[[], None]) -> None:
        self._ports = ports
        self._lease = lease
        self._on_change = on_change

    async def run(self, slot: Slot) -> str | None:
        """Bring ``slot`` back; returns None, or why it stays failed."""
        outcome = ShiftOutcome(slot.slot_id, slot.role, slot.role, self._ports.clock.now_s())
        steps = Steps(slot, outcome, self._ports)
        await self._let_go(steps)
        if not self._ports.deadlines.restart_failed:
            return "trainer.resource_shift.shift.restart_failed is off"
        error: str | None = None
        for _ in range(ATTEMPTS):
            try:
                await self._restart_engines(slot, steps)
            except Exception as failure:  # the way back is the next attempt
                error = str(failure) or repr(failure)
                await self._let_go(steps)
                continue
            slot.recover(self._role_for(slot))
            woken = await bring_up(slot, self._ports)
            if woken.outcome == DONE:
                return None
            error = woken.error
            self._on_change()
        return f"not recovered after {ATTEMPTS} attempts; last: {error}"

    async def _let_go(self, steps: Steps) -> None:
        await steps.kill_unsettled()
        self._on_change()

    async def _restart_engines(self, slot: Slot, steps: Steps) -> None:
        """All engines asleep afterwards. What cannot be killed is not restarted beside its old self."""
        for role in slot.inference_roles:
            while slot.engines[role] is not EngineState.ASLEEP:
                if self._must_wait(slot):
                    await self._lease.changed()
                    continue
                if slot.engines[role] is EngineState.UNSETTLED:
                    await steps.kill(role)
                await steps.restart(role)
                self._on_change()

    def _must_wait(self, slot: Slot) -> bool:
        return self._wanted_by_training(slot) and slot.memory_free

    def _role_for(self, slot: Slot) -> Role:
        return Role.TRAIN if self._wanted_by_training(slot) else slot.role

    def _wanted_by_training(self, slot: Slot) -> bool:
        return Role.TRAIN in slot.can_host and self._lease.state is not LeaseState.FREE
