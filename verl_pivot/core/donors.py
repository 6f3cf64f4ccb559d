"""Which slots may change role, and in which order they are asked: idle, lent by training, least loaded, lowest id."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from verl_pivot.core.outlook import Outlook
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus, SlotView, Snapshot


def train_lends(snapshot: Snapshot) -> bool:
    """Training lends its slots while it wants none and the next batch is not complete: a lent slot would come back
    at once."""
    train = snapshot.train
    batch_ready = 0 < train.groups_needed <= train.groups_ready
    return train.lease is LeaseState.FREE and not batch_ready


def slot_counts(snapshot: Snapshot) -> dict[Role, int]:
    """Slots of each role once shifts in flight end."""
    counts = dict.fromkeys(Role, 0)
    for slot in snapshot.slots:
        if slot.effective_role is not None:
            counts[slot.effective_role] += 1
    return counts


def immunity_left_s(snapshot: Snapshot, settings: PlannerSettings, slot: SlotView) -> float:
    """Seconds a slot still keeps its role. Training's slots are not immune: an update that ended has no use for
    them."""
    return 0.0 if slot.role is Role.TRAIN else max(0.0, slot.since_s + settings.immunity_s - snapshot.now_s)


def movable(snapshot: Snapshot, target: Role, taken: Collection[int] = ()) -> list[SlotView]:
    """Slots that could go to ``target`` if nobody else's needs mattered, cheapest first."""
    lends = train_lends(snapshot)
    candidates = [
        slot
        for slot in snapshot.slots
        if slot.status is SlotStatus.SERVING
        and slot.role is not target
        and target in slot.can_host
        and slot.slot_id not in taken
        and (slot.role is not Role.TRAIN or lends)
    ]
    return sorted(candidates, key=_donor_order)


def _donor_order(slot: SlotView) -> tuple[int, int, int]:
    sequences = slot.load.sequences
    rank = 1 if slot.role is Role.TRAIN else 2 if sequences else 0
    return rank, sequences, slot.slot_id


def free_donors(
    snapshot: Snapshot, outlook: Outlook, settings: PlannerSettings, target: Role, taken: Collection[int] = ()
) -> list[SlotView]:
    """Donors whose leaving costs nobody anything: lent by training, or of a role without work."""
    return [
        slot
        for slot in movable(snapshot, target, taken)
        if slot.role not in outlook.working and not immunity_left_s(snapshot, settings, slot)
    ]


def throughput_donors(
    snapshot: Snapshot, outlook: Outlook, settings: PlannerSettings, counts: Mapping[Role, int], target: Role
) -> list[SlotView]:
    """Donors of a shift by throughput: the free ones, and slots of a working role that delivers more for each request
    than ``target`` does.

    A working role keeps its floor and at least one slot, and gives at most a quarter of its slots in one plan, so that
    small systems move slot by slot and large ones still get somewhere.
    """
    quota = {}
    for role in outlook.working:
        richer = outlook.roles[role].ratio(counts[role]) > outlook.roles[target].ratio(counts[target])
        spare = counts[role] - max(1, settings.floor(role))
        quota[role] = min(spare, max(1, counts[role] // 4)) if richer else 0
    donors = []
    for slot in movable(snapshot, target):
        if immunity_left_s(snapshot, settings, slot):
            continue
        if slot.role in quota:
            if quota[slot.role] <= 0:
                continue
            quota[slot.role] -= 1
        donors.append(slot)
    return donors


def starvation_donor(
    snapshot: Snapshot,
    outlook: Outlook,
    settings: PlannerSettings,
    counts: Mapping[Role, int],
    target: Role,
    taken: Collection[int],
) -> SlotView | None:
    """The slot for a working role that has none, or fewer than its floor; None when there is none to be had now.

    Immunity and cooldown protect no donor. A role without a slot also gets one from a role at its floor when no other
    has one to give, and shares the other role's last slot in time: that goes over once it has served there for
    ``immunity_s``. So two roles with one slot alternate, and neither waits for ever.
    """
    candidates = movable(snapshot, target, taken)

    def keep(least: Mapping[Role, int]) -> list[SlotView]:
        """Candidates whose role has no work, or keeps its ``least`` slots without them."""
        return [s for s in candidates if s.role not in outlook.working or counts[s.role] > least[s.role]]

    above_floor = keep({role: max(1, settings.floor(role)) for role in Role})
    if above_floor or counts[target]:
        return next(iter(above_floor), None)
    served_long = [slot for slot in candidates if not immunity_left_s(snapshot, settings, slot)]
    return next(iter(keep(dict.fromkeys(Role, 1)) or served_long), None)


def displaced_tokens(snapshot: Snapshot, slot: SlotView, target: Role) -> float:
    """Tokens a slot would have generated, at its present rate, while it shifts and its sequences settle elsewhere."""
    costs = snapshot.shift_costs
    return slot.load.tokens_per_s * (costs.seconds(slot.role, target) + costs.migrate_s)


def why_no_donor(snapshot: Snapshot, settings: PlannerSettings, target: Role) -> str:
    """Words for a plan without a donor for ``target``."""
    candidates = movable(snapshot, target)
    immune_s = [left for slot in candidates if (left := immunity_left_s(snapshot, settings, slot))]
    if immune_s:
        fresh = f"{counted(len(immune_s), 'slot')} just took a role"
        return f"no donor for {target}: {fresh}, {min(immune_s):.1f} s of immunity left"
    if any(target in slot.can_host for slot in snapshot.serving(Role.TRAIN)) and not train_lends(snapshot):
        train = snapshot.train
        if train.lease is LeaseState.FREE:
            return f"training keeps its slots: {train.groups_ready} of {train.groups_needed} groups ready"
        return "training holds its slots"
    return f"no donor for {target}"


def counted(count: int, noun: str) -> str:
    """``1 slot``, ``2 slots``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
