"""Settings of the planners: core's own copy of the configuration fields, since core imports no configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_pivot.core.snapshot import Role


@dataclass(frozen=True)
class PlannerSettings:
    """Same fields and defaults as ``config.schema.PlannerConfig``, which documents them for users.

    Raises ValueError that names the field when a value makes no sense.
    """

    name: str = "harmonic"
    interval_s: float = 1.0
    window_s: float = 60.0
    margin: float = 0.05
    cooldown_s: float = 10.0
    immunity_s: float = 10.0
    rollout_floor: int = 0
    genrm_floor: int = 0

    def __post_init__(self) -> None:
        for field in ("interval_s", "window_s"):
            if not getattr(self, field) > 0 or not math.isfinite(getattr(self, field)):
                raise ValueError(f"planner.{field} is {getattr(self, field)}: it must be a number of seconds above 0")
        for field in ("margin", "cooldown_s", "immunity_s", "rollout_floor", "genrm_floor"):
            if not getattr(self, field) >= 0 or not math.isfinite(getattr(self, field)):
                raise ValueError(f"planner.{field} is {getattr(self, field)}: it must be 0 or more")

    def floor(self, role: Role) -> int:
        """Slots that an inference role keeps while it has work; 0 for training, which has a lease instead."""
        return {Role.ROLLOUT: self.rollout_floor, Role.GENRM: self.genrm_floor}.get(role, 0)
