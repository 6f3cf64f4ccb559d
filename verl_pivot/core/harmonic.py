"""The published throughput rule: move slots to where the request-weighted harmonic mean of throughputs gains most."""

from __future__ import annotations

from verl_pivot.core import donors
from verl_pivot.core.lease import plan_training
from verl_pivot.core.moves import Move, MoveScorer
from verl_pivot.core.outlook import Outlook, look_ahead
from verl_pivot.core.plan import Plan, Shift
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus, Snapshot


class HarmonicPlanner:
    """Training first, then roles that starve, then throughput. Holds no state: equal snapshots give equal plans.

    Source: PivotRL's published rule. Beyond it, several slots move in one plan where one alone would be lost in a
    large system, and sequences that wait count as work for further slots.
    """

    name: str = "harmonic"

    def __init__(self, settings: PlannerSettings) -> None:
        self.settings = settings

    def plan(self, snapshot: Snapshot) -> Plan:
        training = plan_training(snapshot)
        if training.shifts:
            return training
        outlook = look_ahead(snapshot)
        starving = self._plan_starving(snapshot, outlook)
        if starving is not None and starving.shifts:
            return starving
        unused = self._plan_unused(snapshot, outlook)
        if unused is not None:
            return unused
        held = self._why_held(snapshot, outlook)
        throughput = Plan((), f"no shift, because {held}") if held else self._plan_throughput(snapshot, outlook)
        return throughput if throughput.shifts or starving is None else starving

    def _plan_starving(self, snapshot: Snapshot, outlook: Outlook) -> Plan | None:
        """A slot for each role that has work and none, then slots up to the floors, and with them all that is to be
        had for free: a role that starts from nothing should not wait a cooldown for its second slot. None when no
        role starves and floors are kept or cannot be."""
        counts = donors.slot_counts(snapshot)
        shifts: list[Shift] = []
        reasons = []
        for role in self._needs(outlook, counts):
            taken = {shift.slot_id for shift in shifts}
            donor = donors.starvation_donor(snapshot, outlook, self.settings, counts, role, taken)
            has = donors.counted(counts[role], "slot") if counts[role] else "no slot"
            need = f"{role} has {donors.counted(outlook.roles[role].work, 'request')} and {has}"
            if donor is None:
                if not counts[role]:
                    reasons.append(f"{need}: {donors.why_no_donor(snapshot, self.settings, role)}")
                continue
            counts[donor.role] -= 1
            counts[role] += 1
            cost = donors.displaced_tokens(snapshot, donor, role)
            shifts.append(Shift(donor.slot_id, donor.role, role, 0.0, cost, need))
            reasons.append(f"{need}: slot {donor.slot_id} from {donor.role}")
        if not shifts:
            return Plan((), f"no shift, because {'; '.join(reasons)}") if reasons else None
        free = self._take_free(snapshot, outlook, counts, {shift.slot_id for shift in shifts})
        if free:
            reasons.append(f"{donors.counted(len(free), 'slot')} that nobody used")
        return Plan((*shifts, *free), "; ".join(reasons))

    def _plan_unused(self, snapshot: Snapshot, outlook: Outlook) -> Plan | None:
        """Slots that nobody uses go to work at once: no cooldown protects anybody from them. None without any."""
        free = self._take_free(snapshot, outlook, donors.slot_counts(snapshot), set())
        if not free:
            return None
        return Plan(free, f"{donors.counted(len(free), 'slot')} that nobody used; {free[0].reason}")

    def _needs(self, outlook: Outlook, counts: dict[Role, int]) -> list[Role]:
        """Roles that need a slot whatever it costs, once for each slot: first those with none, most work first."""
        starving = sorted((r for r in outlook.working if not counts[r]), key=lambda r: -outlook.roles[r].work)
        missing = {role: self.settings.floor(role) - max(1, counts[role]) for role in outlook.working}
        return starving + [role for role in outlook.working for _ in range(missing[role])]

    def _take_free(
        self, snapshot: Snapshot, outlook: Outlook, counts: dict[Role, int], taken: set[int]
    ) -> tuple[Shift, ...]:
        """Give out slots that nobody uses (lent by training, or of a role without work) for as long as a role gains
        by them. Updates ``counts`` and ``taken``."""
        scorer = MoveScorer(snapshot, outlook, self.settings)
        shifts: list[Shift] = []
        while True:
            moves = []
            for role in outlook.working:
                free = donors.free_donors(snapshot, outlook, self.settings, role, taken)
                moves.append(scorer.best(counts, role, free))
            best = _best(moves)
            if best is None or not scorer.worth(best):
                return tuple(shifts)
            shifts.extend(best.shifts(f"nobody uses it, and {best.target} gains: {best.numbers}"))
            for slot in best.slots:
                taken.add(slot.slot_id)
                counts[slot.role] -= 1
                counts[best.target] += 1

    def _why_held(self, snapshot: Snapshot, outlook: Outlook) -> str:
        """Why nothing may shift by throughput now; empty when something may."""
        shifting = sum(slot.status is SlotStatus.SHIFTING for slot in snapshot.slots)
        if shifting:
            return f"{donors.counted(shifting, 'slot')} still shifting"
        if not outlook.working:
            return "no work" if snapshot.train.lease is LeaseState.FREE else "no work besides training"
        if snapshot.last_shift_s is None:
            return ""
        left_s = snapshot.last_shift_s + self.settings.cooldown_s - snapshot.now_s
        return f"cooldown {left_s:.1f} s left" if left_s > 0 else ""

    def _plan_throughput(self, snapshot: Snapshot, outlook: Outlook) -> Plan:
        scorer = MoveScorer(snapshot, outlook, self.settings)
        counts = donors.slot_counts(snapshot)
        moves = []
        for role in outlook.working:
            slots = donors.throughput_donors(snapshot, outlook, self.settings, counts, role)
            moves.append(scorer.best(counts, role, slots))
        best = _best(moves)
        guess = "" if outlook.fitted else " (decode costs not measured yet: even split by requests)"
        if best is None:
            return Plan((), f"no shift, because {self._why_no_move(snapshot, outlook, counts)}{guess}")
        reason = f"{donors.counted(len(best.slots), 'slot')} to {best.target}: {best.numbers}{guess}"
        if scorer.worth(best):
            return Plan(best.shifts(reason), reason)
        share = best.score / (self.settings.window_s * best.before_tokens_per_s)
        why = f"gain {share:.1%} under margin {self.settings.margin:.1%}"
        return Plan((), f"no shift, because {why} for {reason}")

    def _why_no_move(self, snapshot: Snapshot, outlook: Outlook, counts: dict[Role, int]) -> str:
        hungry = [role for role in outlook.working if outlook.roles[role].work > counts[role]]
        if not hungry:
            return "every request has a slot"
        poorest = min(hungry, key=lambda role: outlook.roles[role].ratio(counts[role]))
        return donors.why_no_donor(snapshot, self.settings, poorest)


def _best(moves: list[Move | None]) -> Move | None:
    return max((move for move in moves if move is not None), key=lambda move: move.score, default=None)
