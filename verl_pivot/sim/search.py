"""The best split of the slots for a deployment, found by trying: every deployment is compared at its best."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from verl_pivot.core.snapshot import Role
from verl_pivot.sim.deployments import Deployment, Split
from verl_pivot.sim.draw import Draws
from verl_pivot.sim.result import SimResult, simulate
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.simulation import SimulationStuck


def first_guess(scenario: Scenario) -> Split:
    """Slots in proportion to the least work of each role."""
    draws = Draws.seeded(scenario, 1)
    peak = scenario.peaks(draws.context_tokens(0))
    work = draws.work(0, peak, scenario.staleness)
    busy = {
        role: work.decode_tokens[role] / peak[role].tokens_per_s
        + work.prefill_tokens[role] * peak[role].prefill_s_per_token
        for role in peak
    }
    total = sum(busy.values()) + work.train_slot_s
    slots = scenario.slots
    train = min(slots - 2, max(1, scenario.least_train_slots, round(slots * work.train_slot_s / total)))
    share = busy[Role.ROLLOUT] / sum(busy.values())
    rollout = min(slots - train - 1, max(1, round((slots - train) * share)))
    return Split(train, rollout, slots - train - rollout)


def whole_bunches(scenario: Scenario, steps: int) -> int:
    """``steps``, or the next number of them that makes whole bunches of staleness + 1: of parts of one there is nothing
    to learn, since steps within it are not alike."""
    bunch = scenario.staleness + 1
    return bunch * -(-steps // bunch)


SHIFTING = frozenset({Deployment.HARMONIC, Deployment.LOOKAHEAD})
"""Deployments whose slots find their inference role on their own: only the slots that can train are worth a search."""


def best_split(
    scenario: Scenario,
    deployment: Deployment,
    *,
    tries: int = 24,
    also: Iterable[Split] = (),
    on_try: Callable[[SimResult], None] | None = None,
) -> Split:
    """Hill climbing with ever smaller moves, from the best of ``first_guess`` and ``also``; at most ``tries`` runs,
    those splits among them."""
    warmup = scenario.staleness + 1  # the first bunch begins all at once: it says little
    steps = warmup + whole_bunches(scenario, 3)
    if scenario.slots < 3:
        raise ValueError(f"{scenario.slots} slots cannot be split into three pools")
    if deployment is Deployment.COLOCATED:
        return Split(0, scenario.slots, 0)
    known: dict[Split, float] = {}

    def rate(split: Split) -> float:
        if split not in known:
            try:
                result = simulate(scenario, deployment, split, steps=steps, warmup=warmup)
            except SimulationStuck:
                known[split] = 0.0
            else:
                known[split] = result.tokens_per_s
                if on_try is not None:
                    on_try(result)
        return known[split]

    shifting = deployment in SHIFTING
    starts = list(dict.fromkeys([*also, first_guess(scenario)]))
    best, stride = max(starts[:tries], key=rate), max(1, scenario.slots // (8 if shifting else 12))
    while len(known) < tries:
        near = [s for s in _neighbours(best, stride, scenario.least_train_slots, shifting) if s not in known]
        # The first that is better will do: tries are dear, and what lies beyond it is likely better still.
        better = next((split for split in near[: tries - len(known)] if rate(split) > rate(best)), best)
        if better != best:
            best = better
        elif stride > 1:
            stride //= 2
        elif not near:
            break
    return best


def best_of(
    scenario: Scenario,
    deployment: Deployment,
    steps: int,
    tries: int,
    *,
    split: Split | None = None,
    also: Iterable[Split] = (),
) -> SimResult:
    """``deployment`` at ``split``, or at the best one that ``tries`` runs find, ``also`` among them. Figures are of
    whole bunches of staleness + 1 steps, ``steps`` at least: steps within a bunch are not alike."""
    warmup, measured = 2 * (scenario.staleness + 1), whole_bunches(scenario, max(1, steps))
    best = split or best_split(scenario, deployment, tries=tries, also=also)
    return simulate(scenario, deployment, best, steps=warmup + measured, warmup=warmup)


def _neighbours(split: Split, stride: int, least_train: int, shifting: bool) -> list[Split]:
    """``stride`` slots more or fewer for training, at the cost of the others in proportion; then, unless slots go
    between them anyway, the same between rollout and genrm. No pool becomes empty, or too small to train."""
    found = []
    for train in (split.train + stride, split.train - stride):
        rest = split.slots - train
        rollout = min(rest - 1, max(1, round(rest * split.rollout / (split.rollout + split.genrm))))
        found.append(Split(train, rollout, rest - rollout))
    if not shifting:
        found += [Split(split.train, split.rollout + moved, split.genrm - moved) for moved in (stride, -stride)]
    return [s for s in found if min(s.rollout, s.genrm) >= 1 and s.train >= max(1, least_train)]
