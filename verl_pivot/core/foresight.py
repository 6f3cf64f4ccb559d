"""What a projection is made of, taken from a snapshot: the roles, training, and how far to look."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verl_pivot.core.backlog import GroupBacklog
from verl_pivot.core.role_model import RoleModel
from verl_pivot.core.snapshot import INFERENCE_ROLES, LeaseState, Role, Snapshot
from verl_pivot.core.training_flow import TrainModel

HORIZON = 0.7
"""Of the time that all known work would take if slots were never idle, or that training on it takes if that is longer,
how far to look where there is always a next step; but at least until the longest sequence could have ended. A shorter
look feeds training from what rollout needs next, and does not see where everybody will wait for the last response of a
step."""
_CONTEXT_TOKENS = 1000.0
"""Of a sequence, while none runs that shows it."""
_BATCH_LIMIT = 256.0
"""Sequences of a slot, where nothing says it: vLLM's default for one engine."""


def role_models(snapshot: Snapshot) -> dict[Role, RoleModel] | None:
    """None when work or costs are not known yet."""
    models = {}
    for role in INFERENCE_ROLES:
        if role not in snapshot.backlog or role not in snapshot.decode:
            return None
        serving = snapshot.serving(role)
        running = sum(slot.load.running for slot in serving)
        held = sum(slot.load.context_tokens for slot in serving)
        context = held / running if running else _CONTEXT_TOKENS
        lost = max(0.0, context - snapshot.backlog[role].new_prompt_tokens) if role in snapshot.begins_again else 0.0
        models[role] = RoleModel(
            snapshot.decode[role],
            context,
            snapshot.batch_limit.get(role, _BATCH_LIMIT),
            snapshot.prefill_s_per_token.get(role, 0.0),
            snapshot.backlog[role],
            lost,
        )
    return models


def train_model(snapshot: Snapshot) -> TrainModel:
    """Training as it is now. Every slot that can train belongs to it."""
    train, costs = snapshot.train, snapshot.shift_costs
    slots = [slot for slot in snapshot.slots if Role.TRAIN in slot.can_host and slot.effective_role is not None]
    return TrainModel(
        slots=len(slots),
        is_lent=any(slot.role is not Role.TRAIN for slot in slots),
        busy_s=train.busy_s if train.lease is LeaseState.HELD else 0.0,
        update_s=max(train.update_s, 1e-3),
        groups_ready=train.groups_ready + train.groups_held,
        groups_needed=max(1, train.groups_needed),
        batches_to_publish=train.batches_to_publish,
        batches_per_step=train.batches_per_step,
        arrivals=train.new_prompts,
        to_train_s=costs.seconds(Role.ROLLOUT, Role.TRAIN),
        from_train_s=costs.seconds(Role.TRAIN, Role.ROLLOUT),
        groups=snapshot.groups if snapshot.groups is not None else _evenly(snapshot),
        every_batch_waits=snapshot.staleness > 0,
    )


def _evenly(snapshot: Snapshot) -> GroupBacklog:
    """Groups without knowledge of their members: they end one by one as responses do."""
    values, count = snapshot.backlog[Role.ROLLOUT].remaining_tokens, snapshot.train.groups_open
    if not count or not len(values):
        return GroupBacklog()
    at = ((np.arange(count) + 0.5) * len(values) / count).astype(int)
    judgement = np.full(count, snapshot.backlog[Role.GENRM].new_mean_tokens)
    return GroupBacklog.of(values[at], judgement, np.zeros(count, dtype=bool))


def horizon_s(snapshot: Snapshot, roles: Mapping[Role, RoleModel], train: TrainModel, least_s: float) -> float:
    """Enough for all that is known to end (staleness 0), or for ``HORIZON`` of it and for the longest sequences;
    ``least_s`` at least."""
    judge = roles[Role.GENRM]
    busy_s = roles[Role.ROLLOUT].backlog.sequences * judge.backlog.new_mean_tokens / judge.peak_tokens_per_s
    busy_s += sum(model.backlog.tokens / model.peak_tokens_per_s for model in roles.values())
    updates_s = (train.groups.groups + train.groups_ready) / train.groups_needed * train.update_s
    tails_s = sum(model.tail_s for model in roles.values())
    if snapshot.staleness:
        even_s = (busy_s + updates_s * train.slots) / max(1, slot_count(snapshot))
        return max(least_s, tails_s, HORIZON * max(even_s, updates_s))
    serving = sum(slot.effective_role in INFERENCE_ROLES for slot in snapshot.slots)
    return least_s / 2 + 1.5 * busy_s / max(1, serving) + tails_s + updates_s


def slot_count(snapshot: Snapshot) -> int:
    """Slots that have not failed."""
    return sum(slot.effective_role is not None for slot in snapshot.slots)
