"""Four pairs of policy and judge on 128 GPUs, all deployments, simulated.

    python benchmarks/simulated_cluster.py            # about an hour of one core
    python benchmarks/simulated_cluster.py --pairs 1  # the first pair alone

Costs are the published decode costs for H20; lengths are ours (``WORKLOADS``), since none are published. Every
deployment is shown at the best split of its slots that a search finds (that of the harmonic rule also looks at the best
fixed one; the look-ahead planner has the choice of those two and a guess), and those with pools also at a split like
the published ones (half of the slots train, the rest is shared evenly). What a search chose is measured on lengths that
no search has seen: the best of several tries is partly the luckiest. Writes
``benchmarks/results/simulated_cluster.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.progress import track  # noqa: E402

from verl_pivot.sim.cluster import Cluster  # noqa: E402
from verl_pivot.sim.deployments import Deployment, Split  # noqa: E402
from verl_pivot.sim.models import CostFile  # noqa: E402
from verl_pivot.sim.result import SimResult, simulate  # noqa: E402
from verl_pivot.sim.scenario import Scenario  # noqa: E402
from verl_pivot.sim.search import SHIFTING, best_split  # noqa: E402
from verl_pivot.sim.workload import LengthSpec, Workload  # noqa: E402

GPUS, GPU = 128, "H20"
PAIRS = (
    ("Qwen2.5-1.5B", "GLM-Z1-9B"),
    ("Qwen2.5-7B", "Qwen3-30B-A3B"),
    ("Qwen2.5-32B", "Qwen3-30B-A3B"),
    ("Qwen2.5-72B", "Qwen3.5-122B-A10B"),
)
WORKLOADS = {
    "short tail": Workload(LengthSpec(4000, 0.6, 15360, 0.5), LengthSpec(2500, 0.5, 20480, 0.3)),
    "long tail": Workload(LengthSpec(3000, 1.0, 15360, 0.5), LengthSpec(2500, 0.9, 20480, 0.3)),
}
PUBLISHED = {
    Deployment.COLOCATED: (1.81, 2.05),
    Deployment.DISAGGREGATED: (1.50, 1.95),
    Deployment.ROLLOUT_REWARD_COLOCATED: (1.66, 1.97),
}
"""Of resource shifting over each, on 128 H20."""
UNSEEN_SEED = 10_000
"""Added to a scenario's seed for lengths that no search has seen."""


def scenario_of(pair: tuple[str, str], workload: Workload, staleness: int) -> Scenario:
    return Cluster.of(CostFile.read(), *pair, GPUS, GPU).scenario(workload, staleness=staleness)


def published_like(slots: int) -> Split:
    """Half of the slots train, the others are shared evenly."""
    train, rollout = slots // 2, slots // 4
    return Split(train, rollout, slots - train - rollout)


def results_of(scenario: Scenario, tries: int) -> Iterator[tuple[str, SimResult]]:
    """Every deployment at its best split, and those with pools also at ``published_like``."""
    # Steps come in bunches of staleness + 1: only whole bunches can be compared, and the longest sequence in one makes
    # a tenth of difference, so four are taken.
    bunch = scenario.staleness + 1
    warmup, steps = 2 * bunch, 2 * bunch + max(6, 4 * bunch)
    best: dict[Deployment, Split] = {}
    unseen = replace(scenario, seed=scenario.seed + UNSEEN_SEED)
    for deployment in Deployment:
        known = [best[d] for d in (Deployment.HARMONIC, Deployment.DISAGGREGATED) if d in best]
        also = known if deployment in SHIFTING else []
        count = len(set(known)) + 1 if deployment is Deployment.LOOKAHEAD else tries
        best[deployment] = best_split(scenario, deployment, tries=count, also=also)
        splits = {"best": best[deployment]}
        if deployment is not Deployment.COLOCATED:
            splits["published-like"] = published_like(scenario.slots)
        for which, split in splits.items():
            yield which, simulate(unseen, deployment, split, steps=steps, warmup=warmup)


def rows_of(case: tuple[tuple[str, str], str, int], tries: int) -> list[dict[str, Any]]:
    """All rows of one pair, workload and staleness."""
    pair, name, staleness = case
    scenario = scenario_of(pair, WORKLOADS[name], staleness)
    return [row_of(pair, name, staleness, which, result) for which, result in results_of(scenario, tries)]


def row_of(pair: tuple[str, str], workload: str, staleness: int, which: str, result: SimResult) -> dict[str, Any]:
    ledger = vars(result.ledger)
    return {
        "policy": pair[0],
        "judge": pair[1],
        "lengths": workload,
        "staleness": staleness,
        "deployment": str(result.deployment),
        "which": which,
        "split": str(result.split),
        "tokens_per_s": result.tokens_per_s,
        "step_s": result.step_s,
        "bound_fraction": result.bound_fraction,
        "shifts_per_step": result.shifts / len(result.steps_s),
        **{name: ledger[name] for name in ("small_batches", "recomputed", "shifting", "publish", "reload", "idle")},
    }


OURS = {Deployment.HARMONIC: "gain", Deployment.LOOKAHEAD: "lookahead_gain"}


def gains_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Resource shifting over every other deployment, both at their best split or both at the published-like one, with
    the published range beside it."""
    keys = ("policy", "judge", "lengths", "staleness")
    ours = {(*(row[key] for key in (*keys, "which")), row["deployment"]): row for row in rows}
    found = []
    for row in rows:
        if row["deployment"] in OURS:
            continue
        case = tuple(row[key] for key in (*keys, "which"))
        published = PUBLISHED.get(Deployment(row["deployment"]))
        gains = {name: ours[(*case, str(d))]["tokens_per_s"] / row["tokens_per_s"] for d, name in OURS.items()}
        found.append(
            {
                **{key: row[key] for key in keys},
                "over": row["deployment"],
                "which": row["which"],
                **gains,
                "most_there_is": 1 / row["bound_fraction"],
                "published": f"{published[0]} to {published[1]}" if published else "-",
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="how many of the pairs")
    parser.add_argument("--tries", type=int, default=5, help="splits to try for each deployment")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "simulated_cluster.json")
    options = parser.parse_args()
    began_s, rows = time.perf_counter(), []
    # At staleness 0 the long tail alone: there it decides everything.
    kinds = [("short tail", 2), ("long tail", 2), ("long tail", 0)]
    cases = [(p, name, k) for p in PAIRS[: options.pairs] for name, k in kinds]
    with ProcessPoolExecutor(options.processes) as pool:
        found = pool.map(partial(rows_of, tries=options.tries), cases)
        for of_case in track(found, "simulating", total=len(cases)):
            rows += of_case
            options.out.write_text(json.dumps(document_of(rows, time.perf_counter() - began_s), indent=1) + "\n")
    print(f"wrote {options.out}")
    return 0


def document_of(rows: list[dict[str, Any]], computed_in_s: float) -> dict[str, Any]:
    return {
        "benchmark": "simulated_cluster",
        "title": "Four pairs of policy and judge on 128 GPUs",
        "simulated": True,
        "notes": [
            "Decode costs: published fits for H20. Lengths, prefill, training and shift costs: assumptions, stated in "
            "docs/simulator.md.",
            "Published ranges are of PivotRL on real GPUs with lengths that are not published; they are shown beside, "
            "not matched.",
        ],
        "gpus": GPUS,
        "computed_in_s": round(computed_in_s),
        "gains": gains_of(rows),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
