"""Fixed roles: the baseline to compare with. Slots keep the role they started in; only training's lease moves any."""

from __future__ import annotations

from verl_pivot.core.donors import counted, displaced_tokens, train_lends
from verl_pivot.core.lease import plan_training
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus, Snapshot


class StaticPlanner:
    """Slots return to their first role as soon as training lets them go; training's own slots lend nothing.

    Remembers the role each slot had when it was first seen, so one planner belongs to one run.
    """

    name: str = "static"

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings
        self._first_role: dict[int, Role] = {}

    def plan(self, snapshot: Snapshot) -> Plan:
        for slot in snapshot.slots:
            self._first_role.setdefault(slot.slot_id, slot.role)
        training = plan_training(snapshot)
        if snapshot.train.lease is LeaseState.WANTED:
            return training
        reason = "slot returns to its first role"
        away = [
            slot
            for slot in snapshot.slots
            if slot.status is SlotStatus.SERVING and slot.role is not self._first_role[slot.slot_id]
        ]
        if not away:
            return Plan((), "no shift, because roles are static")
        if not train_lends(snapshot):
            return Plan((), f"no shift, because training keeps {counted(len(away), 'slot')} of other roles")
        homes = [(slot, self._first_role[slot.slot_id]) for slot in away]
        shifts = (Shift(s.slot_id, s.role, home, 0.0, displaced_tokens(snapshot, s, home), reason) for s, home in homes)
        return Plan(tuple(shifts), f"{counted(len(away), 'slot')} to their first role, because training has ended")
