"""Training first: a lease that is wanted is served before anything else is weighed. Shared by all planners."""

from __future__ import annotations

from verl_pivot.core.donors import counted, displaced_tokens
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus, Snapshot


def plan_training(snapshot: Snapshot) -> Plan:
    """Shift every slot that can host training and serves another role, when the lease is wanted. Slots that are
    still shifting follow in a later plan. Nothing is weighed: training is the step's critical path and owns
    these slots."""
    train = snapshot.train
    if train.lease is not LeaseState.WANTED:
        return Plan((), "training wants no slots")
    reason = f"mini-batch ready: {train.groups_ready} of {train.groups_needed} groups"
    shifts = tuple(
        Shift(slot.slot_id, slot.role, Role.TRAIN, 0.0, displaced_tokens(snapshot, slot, Role.TRAIN), reason)
        for slot in snapshot.slots
        if slot.status is SlotStatus.SERVING and slot.role is not Role.TRAIN and Role.TRAIN in slot.can_host
    )
    if shifts:
        return Plan(shifts, f"{reason}; {counted(len(shifts), 'slot')} to train")
    return Plan((), "no shift, because training has its slots or they are on their way")
