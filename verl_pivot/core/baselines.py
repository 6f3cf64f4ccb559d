"""Deployments that people run today, as planners: what shifting is compared with."""

from __future__ import annotations

from verl_pivot.core.donors import counted, displaced_tokens, movable
from verl_pivot.core.lease import plan_training
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, RoleDemand, Snapshot
from verl_pivot.core.static import StaticPlanner


class PhasesPlanner:
    """Roles take turns on the same slots, as colocated deployments do: every response, then every judgement, then
    training. With slots that cannot train, the published rollout-reward colocated deployment. Holds no state."""

    name: str = "phases"

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings

    def plan(self, snapshot: Snapshot) -> Plan:
        if snapshot.train.lease is LeaseState.HELD:
            return Plan((), "no shift, because this is the phase of training")
        training = plan_training(snapshot)
        if snapshot.train.lease is LeaseState.WANTED:
            return training
        phase = self._phase(snapshot)
        if phase is None:
            return Plan((), "no shift, because no phase has work")
        moving = movable(snapshot, phase)
        if not moving:
            return Plan((), f"no shift, because this is the phase of {phase}")
        reason = f"phase of {phase}"
        shifts = tuple(
            Shift(slot.slot_id, slot.role, phase, 0.0, displaced_tokens(snapshot, slot, phase), reason)
            for slot in moving
        )
        return Plan(shifts, f"{counted(len(moving), 'slot')} to {phase}: its phase begins")

    def _phase(self, snapshot: Snapshot) -> Role | None:
        """Rollout until nothing is left of it."""
        for role in (Role.ROLLOUT, Role.GENRM):
            waiting = snapshot.demand.get(role, RoleDemand()).total
            if waiting or any(slot.load.sequences for slot in snapshot.serving(role)):
                return role
        return None


class EnableSwitchPlanner(StaticPlanner):
    """verl's ``enable_switch``: slots of training serve rollout, their first role here, until its batch is ready."""

    name: str = "enable_switch"


class TrainerPoolPlanner(StaticPlanner):
    """Published as trainer-pool only: slots of training have a fixed inference role while training has no use for
    them; which one each has is the layout's."""

    name: str = "trainer_pool"


__all__ = ["EnableSwitchPlanner", "PhasesPlanner", "TrainerPoolPlanner"]
