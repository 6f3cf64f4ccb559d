"""Allocations that a planner may choose from: how many slots go to which role, the cheapest to empty first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_pivot.core import donors
from verl_pivot.core.fluid import Candidates
from verl_pivot.core.plan import Plan
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, LeaseState, Role, SlotView, Snapshot


@dataclass(frozen=True)
class Option:
    """One allocation: ``moving`` slots go to ``target``, all others stay."""

    moving: tuple[SlotView, ...] = ()
    target: Role = Role.ROLLOUT
    lends: bool = False
    """Training's slots serve inference, now or after this option, until they are wanted."""
    defers: bool = False
    """Training waits until all its batches are ready before it takes lent slots."""


def options_of(snapshot: Snapshot, settings: PlannerSettings, suggested: Plan, *, defers: bool = False) -> list[Option]:
    """The present allocation first, then every other worth a look, ``suggested`` (another planner's) among them where
    it keeps what must be kept."""
    lent = any(slot.effective_role not in (None, Role.TRAIN) for slot in snapshot.slots if Role.TRAIN in slot.can_host)
    # What trains now serves inference again afterwards.
    lends = lent or snapshot.train.lease is LeaseState.HELD

    def option(moving: tuple[SlotView, ...], target: Role) -> Option:
        return Option(moving, target, lends or any(slot.role is Role.TRAIN for slot in moving), defers)

    options = [option((), Role.ROLLOUT)]
    for target in INFERENCE_ROLES:
        able = _donors(snapshot, settings, target)
        options += [option(tuple(able[:count]), target) for count in _counts(len(able))]
        chosen = {shift.slot_id for shift in suggested.shifts if shift.target is target}
        if chosen and chosen <= {slot.slot_id for slot in able}:
            options.append(option(tuple(slot for slot in able if slot.slot_id in chosen), target))
    return options


def _donors(snapshot: Snapshot, settings: PlannerSettings, target: Role) -> list[SlotView]:
    """Slots that may go to ``target``, cheapest to empty first. Floors stay, and the last slot of a role that has work,
    or is about to get some, unless ``target`` has no slot at all."""
    counts = donors.slot_counts(snapshot)
    rollout = snapshot.backlog[Role.ROLLOUT].sequences >= 0.5
    genrm = rollout or snapshot.backlog[Role.GENRM].sequences >= 0.5
    least = {Role.ROLLOUT: int(rollout), Role.GENRM: int(genrm), Role.TRAIN: 0}
    if not counts[target] and sum(counts[role] for role in INFERENCE_ROLES) < 2:
        least = dict.fromkeys(least, 0)
    spare = {role: counts[role] - max(least[role], settings.floor(role)) for role in Role}
    able = []
    for slot in sorted(donors.movable(snapshot, target), key=lambda s: (s.load.context_tokens, s.slot_id)):
        if spare[slot.role] > 0 and not donors.immunity_left_s(snapshot, settings, slot):
            spare[slot.role] -= 1
            able.append(slot)
    return able


def _counts(most: int) -> list[int]:
    """How many slots an option moves: each number up to 8, then ever wider apart, and all of them."""
    wanted = [*range(1, 9), *(round(8 * 1.25**k) for k in range(1, 40))]
    return sorted({count for count in wanted if count < most} | ({most} if most else set()))


def candidates_of(snapshot: Snapshot, options: list[Option]) -> Candidates:
    """The options as rows of numbers."""
    own, lent = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for slot in snapshot.slots:
        if slot.effective_role is not None:
            (lent if Role.TRAIN in slot.can_host else own)[slot.effective_role] += 1
    if snapshot.train.lease is LeaseState.HELD and lent[Role.TRAIN]:
        # Afterwards they will serve as the others do now.
        others = max(1, own[Role.ROLLOUT] + own[Role.GENRM])
        rollout = round(lent[Role.TRAIN] * own[Role.ROLLOUT] / others)
        lent[Role.ROLLOUT], lent[Role.GENRM] = (
            lent[Role.ROLLOUT] + rollout,
            lent[Role.GENRM] + lent[Role.TRAIN] - rollout,
        )
        lent[Role.TRAIN] = 0
    rows = [_row(snapshot, option, own, lent) for option in options]
    numbers = dict(zip(_ROW, np.array(rows, dtype=np.float64).T, strict=True))
    lends, defers = (np.array([getattr(option, name) for option in options]) for name in ("lends", "defers"))
    return Candidates(lends=lends, defers=defers, **numbers)


_ROW = (
    "rollout",
    "genrm",
    "rollout_meanwhile",
    "genrm_meanwhile",
    "shift_s",
    "rollout_debt_s",
    "genrm_debt_s",
    "lent_rollout",
    "lent_genrm",
)


def _row(snapshot: Snapshot, option: Option, own: dict[Role, int], lent: dict[Role, int]) -> tuple[float, ...]:
    """One row of ``_ROW``. Slots of training count as lent from the start: their dead time is added to the debts."""
    meanwhile, after, lent = dict(own), dict(own), dict(lent)
    shift_s, debt_s = 0.0, dict.fromkeys(Role, 0.0)
    for slot in option.moving:
        seconds = snapshot.shift_costs.seconds(slot.role, option.target)
        debt_s[slot.role] += slot.load.context_tokens * snapshot.prefill_s_per_token.get(slot.role, 0.0)
        if Role.TRAIN in slot.can_host:
            lent[slot.role] -= 1
            lent[option.target] += 1
            debt_s[option.target] += seconds if slot.role is not Role.TRAIN else 0.0
        else:
            shift_s = max(shift_s, seconds)
            meanwhile[slot.role] -= 1
            after[slot.role] -= 1
            after[option.target] += 1
    return (
        after[Role.ROLLOUT],
        after[Role.GENRM],
        meanwhile[Role.ROLLOUT],
        meanwhile[Role.GENRM],
        shift_s,
        debt_s[Role.ROLLOUT],
        debt_s[Role.GENRM],
        lent[Role.ROLLOUT],
        lent[Role.GENRM],
    )
