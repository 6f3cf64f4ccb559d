"""What moving some slots to a role gains and costs, in tokens over the planner's window."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from verl_pivot.core.outlook import Outlook
from verl_pivot.core.plan import Shift
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role, SlotView, Snapshot


@dataclass(frozen=True)
class Move:
    """Some slots going to one role together. ``gain`` and ``cost`` are tokens over the window."""

    target: Role
    slots: tuple[SlotView, ...]
    before_tokens_per_s: float
    after_tokens_per_s: float
    gain: float
    cost: float

    @property
    def score(self) -> float:
        return self.gain - self.cost

    @property
    def numbers(self) -> str:
        """For reasons: throughput before and after, gain and cost."""
        before, after = self.before_tokens_per_s, self.after_tokens_per_s
        share = f" ({after / before - 1:+.1%})" if before else ""
        return f"{before:.0f} -> {after:.0f} tokens/s{share}, {self.gain:.0f} tokens gained for {self.cost:.0f} lost"

    def shifts(self, reason: str) -> tuple[Shift, ...]:
        """One shift a slot; gain and cost are shared out evenly."""
        gain, cost = self.gain / len(self.slots), self.cost / len(self.slots)
        return tuple(Shift(slot.slot_id, slot.role, self.target, gain, cost, reason) for slot in self.slots)


@dataclass(frozen=True)
class MoveScorer:
    """Scores moves against one snapshot: harmonic throughput gained over the window, less what is missing of it while
    the slots shift and serve nobody, less the tokens that evicted sequences do not get while they move elsewhere.

    Source: PivotRL's published score, with the time of the shift itself added to the cost.
    """

    snapshot: Snapshot
    outlook: Outlook
    settings: PlannerSettings

    def best(self, counts: Mapping[Role, int], target: Role, slots: Sequence[SlotView]) -> Move | None:
        """The best number of slots to take from the front of ``slots``: 1, 2, 4 and so on, or as many as still find a
        sequence to run. None when that is none, or ``target`` has no slot yet (it starves: no matter of degree)."""
        useful = min(len(slots), self.outlook.roles[target].work - counts[target])
        if useful <= 0 or not counts[target]:
            return None
        served = [role for role in self.outlook.working if counts[role]]
        sizes = sorted({min(2**power, useful) for power in range(useful.bit_length() + 1)})
        moves = [self._move(counts, target, tuple(slots[:size]), served) for size in sizes]
        return max(moves, key=lambda move: move.score)

    def worth(self, move: Move) -> bool:
        """Does the gain beat the cost by the margin?"""
        return move.score > self.settings.margin * self.settings.window_s * move.before_tokens_per_s

    def _move(
        self, counts: Mapping[Role, int], target: Role, slots: tuple[SlotView, ...], served: Collection[Role]
    ) -> Move:
        meanwhile = dict(counts)
        for slot in slots:
            meanwhile[slot.role] -= 1
        after = {**meanwhile, target: meanwhile[target] + len(slots)}
        now, then = self.outlook.harmonic(counts, served), self.outlook.harmonic(after, served)
        costs = self.snapshot.shift_costs
        shift_s = max(costs.seconds(slot.role, target) for slot in slots)
        missing = shift_s * max(0.0, then - self.outlook.harmonic(meanwhile, served))
        evicted = costs.migrate_s * sum(self._slot_tokens_per_s(slot) for slot in slots)
        return Move(target, slots, now, then, self.settings.window_s * (then - now), missing + evicted)

    def _slot_tokens_per_s(self, slot: SlotView) -> float:
        if slot.role not in INFERENCE_ROLES:
            return 0.0
        return self.outlook.roles[slot.role].slot_tokens_per_s(slot.load.running)
