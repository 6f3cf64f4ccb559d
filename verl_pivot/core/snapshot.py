"""What a decision may look at: a frozen view of the whole system at one instant.

Built by the runtime's controller (control-plane process) and by the simulator; read by planners.
Nothing here acts, blocks or knows the wall clock: time comes in as ``now_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from verl_pivot.core.backlog import Backlog, GroupBacklog
from verl_pivot.core.costs import DecodeCost, ShiftCosts


class Role(StrEnum):
    """What a slot works on. A slot has exactly one role unless it is shifting or failed."""

    ROLLOUT = "rollout"
    GENRM = "genrm"
    TRAIN = "train"


INFERENCE_ROLES = (Role.ROLLOUT, Role.GENRM)
"""Roles that engines serve."""


class SlotStatus(StrEnum):
    """``serving``: has its role. ``shifting``: between two roles. ``failed``: belongs to nobody."""

    SERVING = "serving"
    SHIFTING = "shifting"
    FAILED = "failed"


class LeaseState(StrEnum):
    """The trainer's right to its slots: not wanted, asked for and not yet granted, or held."""

    FREE = "free"
    WANTED = "wanted"
    HELD = "held"


@dataclass(frozen=True)
class ReplicaLoad:
    """Load of the awake engines of one slot, as they last reported it."""

    running: int = 0
    """Sequences in the decode batch."""
    waiting: int = 0
    """Sequences admitted by the engine and not yet scheduled."""
    context_tokens: int = 0
    """Tokens (prompt and generated) of all running sequences."""
    tokens_per_s: float = 0.0
    """Generated tokens per second over the last report interval."""
    first_token_s: float = 0.0
    """Mean seconds from a request's arrival at the engine to its first token, over the requests that got one since
    the last report; 0 when none did. What a sequence that moves here pays."""
    kv_tokens: int = 0
    """Tokens that the KV caches hold together; 0 where not known."""

    @property
    def sequences(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True)
class SlotView:
    """One slot at one instant."""

    slot_id: int
    role: Role
    """Current role; while shifting, the role it came from."""
    status: SlotStatus
    can_host: frozenset[Role]
    """Roles this slot has engines (or the actor) for."""
    since_s: float
    """When it took its present role (``now_s`` time base)."""
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    target: Role | None = None
    """While shifting, the role it goes to."""

    @property
    def effective_role(self) -> Role | None:
        """Where this slot's capacity will be once shifts in flight end; None when failed."""
        if self.status is SlotStatus.FAILED:
            return None
        return self.target if self.status is SlotStatus.SHIFTING and self.target else self.role


@dataclass(frozen=True)
class RoleDemand:
    """Work that waits for a role outside its engines."""

    queued: int = 0
    """Requests that no engine has accepted yet."""
    inflight: int = 0
    """Requests given to an engine and not yet answered."""

    @property
    def total(self) -> int:
        return self.queued + self.inflight


@dataclass(frozen=True)
class TrainView:
    """The training unit."""

    lease: LeaseState = LeaseState.FREE
    groups_ready: int = 0
    groups_needed: int = 0
    """Groups that the next (mini-)batch takes."""
    groups_open: int = 0
    """Groups under way: submitted, and neither ready nor trained."""
    update_s: float = 0.0
    """Predicted seconds of the next (mini-)batch; 0: not known."""
    busy_s: float = 0.0
    """Predicted seconds that the present one, and a publish after it, will still take."""
    batches_to_publish: int = 1
    """(Mini-)batches until a new version is published, the present one included."""
    batches_per_step: int = 1
    wanted_s: float = 0.0
    """Seconds since the lease was asked for; 0 unless it is wanted."""
    new_prompts: int = 0
    """Requests to rollout that a new version lets in; 0 when no more are to come."""
    groups_held: int = 0
    """Further ones that are ready and held up: no batch begins before groups that are due are ready too."""


@dataclass(frozen=True)
class Snapshot:
    """All that a decision may look at."""

    now_s: float
    slots: tuple[SlotView, ...]
    demand: Mapping[Role, RoleDemand]
    """For ``rollout`` and ``genrm``."""
    train: TrainView
    decode: Mapping[Role, DecodeCost]
    """Fitted decode cost of one slot in each inference role, its engines together; absent until it is measured."""
    shift_costs: ShiftCosts
    policy_version: int = 0
    last_shift_s: float | None = None
    """When the last shift began; None before the first."""
    backlog: Mapping[Role, Backlog] = field(default_factory=dict)
    """Predicted work by inference role; absent where lengths are not predicted."""
    groups: GroupBacklog | None = None
    """What stands between groups and training; None where lengths are not predicted."""
    prefill_s_per_token: Mapping[Role, float] = field(default_factory=dict)
    """Of one slot, by inference role; absent where not measured."""
    batch_limit: Mapping[Role, float] = field(default_factory=dict)
    """Sequences that one slot runs at a time, by inference role, as memory and engine allow; absent where unknown."""
    staleness: int = 0
    """Versions that rollout may run ahead of training."""
    begins_again: frozenset[Role] = frozenset()
    """Roles whose requests lose what they have generated when a shift cuts them off."""

    def serving(self, role: Role) -> tuple[SlotView, ...]:
        """Slots that have ``role`` now (not shifting, not failed)."""
        return tuple(s for s in self.slots if s.status is SlotStatus.SERVING and s.role is role)
