"""The best split of the slots for a deployment, found by trying: every deployment is compared at its best."""

from __future__ import annotations

from collections.abc import Callable

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


def best_split(
    scenario: Scenario,
    deployment: Deployment,
    *,
    steps: int | None = None,
    tries: int = 24,
    on_try: Callable[[SimResult], None] | None = None,
) -> Split:
    """Hill climbing from ``first_guess`` with ever smaller moves of slots between two pools; at most ``tries`` runs."""
    warmup = 2 + 2 * scenario.staleness  # the first prompts all begin at once: what they leave behind must be gone
    steps = steps or warmup + 2
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

    best, stride = first_guess(scenario), max(1, scenario.slots // 8)
    rate(best)
    while len(known) < tries:
        near = [split for split in _neighbours(best, stride, scenario.least_train_slots) if split not in known]
        better = max([best, *near[: tries - len(known)]], key=rate)
        if better != best:
            best = better
        elif stride > 1:
            stride //= 2
        elif not near:
            break
    return best


def _neighbours(split: Split, stride: int, least_train: int) -> list[Split]:
    """All splits with ``stride`` slots moved from one pool to another; none becomes empty, or too small to train."""
    pools = (split.train, split.rollout, split.genrm)
    found = []
    for source in range(3):
        for target in range(3):
            moved = list(pools)
            moved[source] -= stride
            moved[target] += stride
            if source != target and min(moved) >= 1 and moved[0] >= least_train:
                found.append(Split(*moved))
    return found
