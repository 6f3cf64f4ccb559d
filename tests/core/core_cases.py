"""Short ways to write snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_pivot.core.costs import DecodeCost, ShiftCosts
from verl_pivot.core.snapshot import (
    LeaseState,
    ReplicaLoad,
    Role,
    RoleDemand,
    SlotStatus,
    SlotView,
    Snapshot,
    TrainView,
)

ROLLOUT, GENRM, TRAIN = Role.ROLLOUT, Role.GENRM, Role.TRAIN
ALL = frozenset(Role)
INFERENCE = frozenset({ROLLOUT, GENRM})
COMPUTE_BOUND = DecodeCost(base_s=0.001, per_seq_s=0.01)
"""Throughput grows with slots: a slot does about 100 tokens/s however many sequences it runs."""
LATENCY_BOUND = DecodeCost(floor_s=0.02)
"""Throughput does not grow with slots: a step takes the same for any batch."""


def slot(
    slot_id: int,
    role: Role,
    running: int = 0,
    *,
    can_host: frozenset[Role] = ALL,
    since_s: float = 0.0,
    status: SlotStatus = SlotStatus.SERVING,
    target: Role | None = None,
    waiting: int = 0,
) -> SlotView:
    load = ReplicaLoad(running, waiting, context_tokens=100 * running, tokens_per_s=10.0 * running)
    return SlotView(slot_id, role, status, can_host, since_s, load, target)


def snapshot(
    slots: Sequence[SlotView],
    *,
    rollout: int = 0,
    genrm: int = 0,
    queued: Mapping[Role, int] | None = None,
    train: TrainView | None = None,
    cost: DecodeCost | Mapping[Role, DecodeCost] | None = COMPUTE_BOUND,
    shift_costs: ShiftCosts | None = None,
    now_s: float = 100.0,
    last_shift_s: float | None = None,
) -> Snapshot:
    """``rollout`` and ``genrm``: requests in flight; ``queued``: further ones before the engines."""
    queued = queued or {}
    decode = {ROLLOUT: cost, GENRM: cost} if isinstance(cost, DecodeCost) else dict(cost or {})
    return Snapshot(
        now_s=now_s,
        slots=tuple(slots),
        demand={
            ROLLOUT: RoleDemand(queued.get(ROLLOUT, 0), rollout),
            GENRM: RoleDemand(queued.get(GENRM, 0), genrm),
        },
        train=train or TrainView(),
        decode=decode,
        shift_costs=shift_costs or ShiftCosts(default_s=1.0, migrate_s=0.5),
        last_shift_s=last_shift_s,
    )


def lease(state: LeaseState, ready: int = 0, needed: int = 0) -> TrainView:
    return TrainView(state, ready, needed)


def fleet(counts: Mapping[Role, int], running: Mapping[Role, int] | None = None) -> list[SlotView]:
    """``counts`` slots of each role, ids from 0; ``running`` sequences on each of a role's slots."""
    roles = [role for role, count in counts.items() for _ in range(count)]
    return [slot(index, role, (running or {}).get(role, 0)) for index, role in enumerate(roles)]
