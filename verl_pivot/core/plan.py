"""The decision: which slots change role, what that is expected to gain and cost, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_pivot.core.snapshot import Role, Snapshot


@dataclass(frozen=True)
class Shift:
    """One slot changing role."""

    slot_id: int
    source: Role
    target: Role
    gain: float
    """Predicted gain in the planner's own unit (harmonic: tokens over the window)."""
    cost: float
    """Predicted cost in the same unit."""
    reason: str


@dataclass(frozen=True)
class Plan:
    """Shifts to make now; empty means "none, because ``reason``"."""

    shifts: tuple[Shift, ...]
    reason: str

    @property
    def is_empty(self) -> bool:
        return not self.shifts


class Planner(Protocol):
    """Turns a snapshot into a plan. Called by the controller and by the simulator; must not act or block."""

    name: str

    def plan(self, snapshot: Snapshot) -> Plan: ...
