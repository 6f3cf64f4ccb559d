"""A shift is a transaction: one slot changes role, or keeps its old one, or fails; no sequence is lost.

    mask, drain, sleep the old engine | commit | load, verify, wake, admit the new engine

Every step has its own deadline. A step that fails or is late sends the slot back to its old role; if that fails too,
or an engine's process is gone, the slot is marked failed with both engines asleep or dead and admission masked. Its
sequences are elsewhere by then: drained ones went back to their clients, and a killed engine's clients see an error
and ask another. Runs in the control plane's event loop, started by the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from verl_pivot.core.plan import Shift
from verl_pivot.core.snapshot import Role
from verl_pivot.runtime.ports import EngineDead
from verl_pivot.runtime.slots import EngineState, Slot
from verl_pivot.runtime.steps import ShiftOutcome, ShiftPorts, Steps, StepTimeout

DONE, ROLLED_BACK, FAILED, CANCELLED = "done", "rolled_back", "failed", "cancelled"


async def run_shift(slot: Slot, shift: Shift, ports: ShiftPorts) -> ShiftOutcome:
    """Carry out ``shift`` on a slot whose ``begin_shift`` was called; emits one ``shift`` event.

    Leaves the slot serving the target, serving the source, or failed. Cancelled, it leaves the slot failed and its
    engines as they are, and raises CancelledError.
    """

    async def forward(steps: Steps) -> str:
        if shift.source is not Role.TRAIN:
            await steps.drain(shift.source)
            await steps.sleep(shift.source)
        slot.commit()
        if shift.target is not Role.TRAIN:
            if slot.engines[shift.target] is EngineState.DEAD and ports.deadlines.restart_failed:
                await steps.restart(shift.target)
            await steps.open(shift.target)
        slot.finish(ports.clock.now_s())
        return DONE

    async def back(steps: Steps, error: Exception) -> str:
        if shift.target is not Role.TRAIN and not slot.engines[shift.target].frees_memory:
            # An engine that let one deadline pass would let the next pass as well.
            await (steps.kill if isinstance(error, StepTimeout) else steps.sleep)(shift.target)
        if shift.source is not Role.TRAIN:
            is_awake = slot.engines[shift.source] is EngineState.AWAKE
            await (steps.reopen(shift.source) if is_awake else steps.open(shift.source))
        slot.roll_back(ports.clock.now_s())
        return ROLLED_BACK

    outcome = ShiftOutcome(slot.slot_id, shift.source, shift.target, ports.clock.now_s())
    try:
        await _transact(slot, outcome, ports, forward, back)
    finally:
        ports.events.emit("shift", **_event_fields(outcome, shift))
    return outcome


async def bring_up(slot: Slot, ports: ShiftPorts) -> ShiftOutcome:
    """Take a slot that belongs to nobody (at the start, or recovered) into its target role."""

    async def forward(steps: Steps) -> str:
        if slot.target is not Role.TRAIN:
            assert slot.target is not None
            await steps.open(slot.target)
        slot.finish(ports.clock.now_s())
        return DONE

    outcome = ShiftOutcome(slot.slot_id, slot.role, slot.role, ports.clock.now_s())
    await _transact(slot, outcome, ports, forward, None)
    return outcome


async def refresh(slot: Slot, ports: ShiftPorts) -> ShiftOutcome:
    """Give a serving slot, whose ``begin_refresh`` was called, the wanted weights. It cannot roll back to weights
    that were replaced: a slot that does not take the new ones fails."""

    async def forward(steps: Steps) -> str:
        await steps.drain(slot.role)
        await steps.open(slot.role)
        slot.finish(ports.clock.now_s())
        return DONE

    outcome = ShiftOutcome(slot.slot_id, slot.role, slot.role, ports.clock.now_s())
    await _transact(slot, outcome, ports, forward, None)
    return outcome


Attempt = Callable[[Steps], Awaitable[str]]
WayBack = Callable[[Steps, Exception], Awaitable[str]]


async def _transact(
    slot: Slot, outcome: ShiftOutcome, ports: ShiftPorts, forward: Attempt, back: WayBack | None
) -> None:
    steps = Steps(slot, outcome, ports)
    try:
        try:
            outcome.outcome = await forward(steps)
        except Exception as error:  # any failure has a way back, or the slot is given up
            outcome.error = str(error) or repr(error)
            if back is None or isinstance(error, EngineDead):
                await _give_up(slot, outcome, steps)
                return
            try:
                outcome.outcome = await back(steps, error)
            except Exception as second:
                outcome.error = f"{outcome.error}; way back: {second}"
                await _give_up(slot, outcome, steps)
    except asyncio.CancelledError:
        outcome.outcome, outcome.error = CANCELLED, "the run ended"
        steps.mask()
        if slot.failure is None:
            slot.fail("cancelled")
        raise
    finally:
        outcome.duration_s = ports.clock.now_s() - outcome.t_start_s


async def _give_up(slot: Slot, outcome: ShiftOutcome, steps: Steps) -> None:
    outcome.outcome, outcome.version = FAILED, None
    steps.mask()
    slot.fail(outcome.error or "unknown")
    await steps.kill_unsettled()


def _event_fields(outcome: ShiftOutcome, shift: Shift) -> dict[str, object]:
    return {
        "slot": outcome.slot_id,
        "source": str(outcome.source),
        "target": str(outcome.target),
        "t_start_s": outcome.t_start_s,
        "duration_s": outcome.duration_s,
        **{f"{step}_s": seconds for step, seconds in outcome.steps_s.items()},
        "aborted": outcome.aborted,
        "outcome": outcome.outcome,
        "reason": shift.reason,
        "gain": shift.gain,
        "cost": shift.cost,
        "error": outcome.error,
    }
