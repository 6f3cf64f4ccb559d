"""What a role would deliver on a given number of slots: the throughput model behind the harmonic rule.

A role's sequences are spread evenly over its slots, and each slot decodes at the rate its decode cost predicts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from verl_pivot.core.costs import DecodeCost
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role, RoleDemand, SlotView, Snapshot

EVEN_SPLIT_COST = DecodeCost(per_seq_s=0.01)
"""Stands in until both roles are measured: every busy slot delivers the same, so slots follow request counts."""


@dataclass(frozen=True)
class RoleOutlook:
    """One inference role: its work, and how fast slots get through it."""

    work: int
    """Requests not answered yet, in engines or before them: the weight of the role, and the sequences to spread."""
    context_tokens: float
    """Mean tokens held by one running sequence."""
    batch_limit: int | None
    """Sequences that one slot runs at a time, where engines have shown it; None: no limit seen."""
    cost: DecodeCost

    def tokens_per_s(self, slots: int) -> float:
        """Tokens a second of the role on ``slots`` slots."""
        if slots <= 0 or self.work <= 0:
            return 0.0
        sequences = self.work if self.batch_limit is None else min(self.work, slots * self.batch_limit)
        share, larger = divmod(sequences, slots)
        return larger * self.slot_tokens_per_s(share + 1) + (slots - larger) * self.slot_tokens_per_s(share)

    def slot_tokens_per_s(self, sequences: int) -> float:
        """Tokens a second of one slot that runs ``sequences`` sequences of mean context."""
        return self.cost.tokens_per_s(sequences, sequences * self.context_tokens)

    def ratio(self, slots: int) -> float:
        """Throughput for each request; the role where it is lowest receives. Infinite without work."""
        return self.tokens_per_s(slots) / self.work if self.work else math.inf


@dataclass(frozen=True)
class Outlook:
    """Both inference roles at one instant."""

    roles: Mapping[Role, RoleOutlook]
    fitted: bool
    """False while ``EVEN_SPLIT_COST`` stands in for a decode cost that is not measured yet."""

    @property
    def working(self) -> tuple[Role, ...]:
        """Roles with work."""
        return tuple(role for role in INFERENCE_ROLES if self.roles[role].work)

    def harmonic(self, slots: Mapping[Role, int], among: Collection[Role]) -> float:
        """Harmonic mean of the throughputs of the roles ``among`` those with work, weighted by requests (tokens/s):
        a pipeline of both is as fast as its requests' mean time allows. 0 when one of them has no throughput.
        Source: PivotRL's published planner rule."""
        work, time = 0, 0.0
        for role in among:
            rate = self.roles[role].tokens_per_s(slots[role])
            if rate <= 0:
                return 0.0
            work += self.roles[role].work
            time += self.roles[role].work / rate
        return work / time if time else 0.0


def look_ahead(snapshot: Snapshot) -> Outlook:
    """The outlook of a snapshot. Decode costs count only when every role with work has one: two scales that were
    not measured alike must not be compared."""
    serving: dict[Role, list[SlotView]] = {role: list(snapshot.serving(role)) for role in INFERENCE_ROLES}
    work = {role: _work(snapshot.demand.get(role, RoleDemand()), serving[role]) for role in INFERENCE_ROLES}
    fitted = all(role in snapshot.decode for role in INFERENCE_ROLES if work[role])
    roles = {}
    for role in INFERENCE_ROLES:
        running = sum(slot.load.running for slot in serving[role])
        context_tokens = sum(slot.load.context_tokens for slot in serving[role])
        roles[role] = RoleOutlook(
            work=work[role],
            context_tokens=context_tokens / running if running else 0.0,
            batch_limit=_batch_limit(snapshot.demand.get(role, RoleDemand()), serving[role]),
            cost=snapshot.decode.get(role, EVEN_SPLIT_COST) if fitted else EVEN_SPLIT_COST,
        )
    return Outlook(roles, fitted)


def _work(demand: RoleDemand, serving: list[SlotView]) -> int:
    """Engines and router report at different moments; believe the larger number, so that work is never overlooked."""
    return max(demand.total, sum(slot.load.sequences for slot in serving))


def _batch_limit(demand: RoleDemand, serving: list[SlotView]) -> int | None:
    """What one slot runs at most, seen only where sequences wait although slots serve: then a further slot runs
    sequences that otherwise wait, instead of thinning the batches of the others."""
    full = [slot for slot in serving if slot.load.waiting or demand.queued]
    return max((slot.load.running for slot in full), default=0) or None
