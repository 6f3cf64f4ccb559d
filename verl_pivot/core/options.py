"""Allocations that a planner may choose from: how many slots go to which role, the cheapest to empty first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from verl_pivot.core import donors
from verl_pivot.core.fluid import Candidates
from verl_pivot.core.plan import Plan
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, LeaseState, Role, SlotView, Snapshot


@dataclass(frozen=True)
class Option:
    """One allocation: slots go where ``moves`` says, all others stay."""

    moves: tuple[tuple[SlotView, Role], ...] = ()
    waits_for: int = 1
    """Batches that must be ready before training takes lent slots."""
    seconded: bool = False
    """Another planner would do the same."""

    def feeds(self, role: Role) -> bool:
        """It gives slots to ``role``."""
        return any(target is role for _, target in self.moves)

    def __str__(self) -> str:
        counts = Counter(str(target) for _, target in self.moves)
        return " and ".join(f"{donors.counted(counts[role], 'slot')} to {role}" for role in sorted(counts))


def options_of(snapshot: Snapshot, settings: PlannerSettings, suggested: Plan, *, held: bool = False) -> list[Option]:
    """The present allocation first, then ``suggested`` (another planner's), if it moves anything; then every other
    worth a look, unless ``held``."""
    options = [Option()]
    sensible = _sensible(snapshot, suggested)
    if sensible:
        options.append(Option(sensible, seconded=True))
    if held:
        return options
    for target in INFERENCE_ROLES:
        able = [(slot, target) for slot in _donors(snapshot, settings, target)]
        own = [(slot, target) for slot, target in able if slot.role is not Role.TRAIN]
        # Slots of training are free at first and dear later: with them, and without.
        for moves in [able, own] if own and len(own) < len(able) else [able]:
            options += [_option(tuple(moves[:count]), sensible) for count in _counts(len(moves))]
    return options


def _option(moves: tuple[tuple[SlotView, Role], ...], suggested: tuple[tuple[SlotView, Role], ...]) -> Option:
    """Seconded where another planner would move these slots too: what it does less than that one is no risk."""
    wanted = {(slot.slot_id, target) for slot, target in suggested}
    return Option(moves, seconded={(slot.slot_id, target) for slot, target in moves} <= wanted)


def _sensible(snapshot: Snapshot, suggested: Plan) -> tuple[tuple[SlotView, Role], ...]:
    """What is suggested, but for shifts that leave no slot to a role which has work or is about to get some: it would
    have to come back at once. A role without a slot gets one nevertheless."""
    counts, least = donors.slot_counts(snapshot), _least(snapshot)
    slots = {slot.slot_id: slot for slot in snapshot.slots}
    moves = []
    for shift in suggested.shifts:
        slot = slots[shift.slot_id]
        if counts[slot.role] > least[slot.role] or not counts[shift.target]:
            counts[slot.role] -= 1
            counts[shift.target] += 1
            moves.append((slot, shift.target))
    return tuple(moves)


def _least(snapshot: Snapshot) -> dict[Role, int]:
    """Slots that each role needs, because it has work, or will as soon as a response ends."""
    rollout = snapshot.backlog[Role.ROLLOUT].sequences >= 0.5
    genrm = rollout or snapshot.backlog[Role.GENRM].sequences >= 0.5
    return {Role.ROLLOUT: int(rollout), Role.GENRM: int(genrm), Role.TRAIN: 0}


def _donors(snapshot: Snapshot, settings: PlannerSettings, target: Role) -> list[SlotView]:
    """Slots that may go to ``target``, cheapest to empty first. Floors stay, and the last slot of a role that has work,
    or is about to get some, unless ``target`` has no slot at all."""
    counts = donors.slot_counts(snapshot)
    least = _least(snapshot)
    if not counts[target] and sum(counts[role] for role in INFERENCE_ROLES) < 2:
        least = dict.fromkeys(least, 0)
    spare = {role: counts[role] - max(least[role], settings.floor(role)) for role in Role}
    able = []
    for slot in sorted(
        donors.movable(snapshot, target), key=lambda s: (again_s(snapshot, s), s.load.context_tokens, s.slot_id)
    ):
        if spare[slot.role] > 0 and not donors.immunity_left_s(snapshot, settings, slot):
            spare[slot.role] -= 1
            able.append(slot)
    return able


def move_cost_s(snapshot: Snapshot, slot: SlotView, target: Role) -> float:
    """Slot-seconds that one shift costs: its dead time, and to compute again what it cuts off."""
    return snapshot.shift_costs.seconds(slot.role, target) + again_s(snapshot, slot)


def again_s(snapshot: Snapshot, slot: SlotView) -> float:
    """Slot-seconds that it takes elsewhere to come to where the sequences of ``slot`` are: prefill, and where requests
    begin again also the tokens that are lost."""
    seconds = slot.load.context_tokens * snapshot.prefill_s_per_token.get(slot.role, 0.0)
    if slot.role in snapshot.begins_again and slot.load.tokens_per_s > 0:
        prompts = slot.load.running * snapshot.backlog[slot.role].new_prompt_tokens
        seconds += max(0.0, slot.load.context_tokens - prompts) / slot.load.tokens_per_s
    return seconds


def _counts(most: int) -> list[int]:
    """How many slots an option moves: 1, 2, 3, 4, then ever wider apart, and all of them."""
    wanted = [*range(1, 5), *(round(4 * 1.4**k) for k in range(1, 26))]
    return sorted({count for count in wanted if count < most} | ({most} if most else set()))


def candidates_of(snapshot: Snapshot, options: list[Option]) -> Candidates:
    """The options as rows of numbers, two for each: training lends its slots again after each update, or keeps them."""
    own, lent = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for slot in snapshot.slots:
        if slot.effective_role is not None:
            (lent if Role.TRAIN in slot.can_host else own)[slot.effective_role] += 1
    is_lent = bool(lent[Role.ROLLOUT] + lent[Role.GENRM])
    if snapshot.train.lease is LeaseState.HELD and lent[Role.TRAIN]:
        # Afterwards they will serve as the others do now.
        others = max(1, own[Role.ROLLOUT] + own[Role.GENRM])
        rollout = round(lent[Role.TRAIN] * own[Role.ROLLOUT] / others)
        lent[Role.ROLLOUT] += rollout
        lent[Role.GENRM] += lent[Role.TRAIN] - rollout
        lent[Role.TRAIN] = 0
    rows = np.array([_row(snapshot, option, own, lent) for option in options], dtype=np.float64)
    numbers = dict(zip(_ROW, np.tile(rows.T, 2), strict=True))
    lends = [is_lent or any(slot.role is Role.TRAIN for slot, _ in option.moves) for option in options]
    waits_for = np.array([option.waits_for for option in options], dtype=np.float64)
    again = np.repeat([True, False], len(options))
    return Candidates(lends_now=np.tile(lends, 2), lends_again=again, waits_for=np.tile(waits_for, 2), **numbers)


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
    for slot, target in option.moves:
        seconds = snapshot.shift_costs.seconds(slot.role, target)
        debt_s[slot.role] += again_s(snapshot, slot)
        if Role.TRAIN in slot.can_host:
            lent[slot.role] -= 1
            lent[target] += 1
            debt_s[target] += seconds if slot.role is not Role.TRAIN else 0.0
        else:
            shift_s = max(shift_s, seconds)
            meanwhile[slot.role] -= 1
            after[slot.role] -= 1
            after[target] += 1
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
