"""Planners on random workloads: the look-ahead planner against the harmonic rule and the best fixed deployment.

    python benchmarks/simulated_random.py                # 200 workloads, about two hours of one core
    python benchmarks/simulated_random.py --cases 20     # the first 20 of them
    python benchmarks/simulated_random.py --resume       # those that the result does not have yet

Clusters of 8 to 256 GPUs, any of the published pairs, any tail, staleness 0 to 4; case ``n`` is drawn from seed ``n``.
Every deployment is at the best split that a search found for it; the planners may also begin at the best fixed pools,
and the look-ahead planner at the best split of the harmonic rule. Searches see the lengths of one seed, and what they
chose is measured on the lengths of another: the best of several tries is partly the luckiest, and luck does not carry
over. Bunches of steps vary, so that every ratio comes with its spread. Every case is in the result, the lost ones too:
``benchmarks/results/simulated_random.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.progress import track  # noqa: E402

from benchmarks.simulated_cluster import GPU, PAIRS, UNSEEN_SEED  # noqa: E402
from verl_pivot.sim.cluster import Cluster  # noqa: E402
from verl_pivot.sim.deployments import Deployment, Split  # noqa: E402
from verl_pivot.sim.models import CostFile  # noqa: E402
from verl_pivot.sim.result import SimResult, simulate  # noqa: E402
from verl_pivot.sim.scenario import Scenario  # noqa: E402
from verl_pivot.sim.search import best_split, whole_bunches  # noqa: E402
from verl_pivot.sim.workload import LengthSpec, Workload  # noqa: E402

TRIES = 5
"""Splits for each search."""
LOOKAHEAD_TRIES = 3
"""The same for the look-ahead planner, whose runs take longest: the two splits it is given, and a guess."""
CONFIDENCE = 0.95
HEAVY_SIGMA = 1.0
"""From this deviation of the logarithm on a tail counts as heavy."""
FIXED = (Deployment.COLOCATED, Deployment.DISAGGREGATED)


def draw(case: int) -> tuple[Scenario, dict[str, Any]]:
    """The scenario of a case, and what it is."""
    rng = np.random.default_rng(case)
    pair = PAIRS[rng.integers(len(PAIRS))]
    least = {PAIRS[0]: 3, PAIRS[-1]: 5}.get(pair, 4)  # four slots at least, of 1, 4 or 8 GPUs
    gpus = int(2 ** rng.integers(least, 9))
    staleness, sigma, judge_sigma = int(rng.integers(0, 5)), float(rng.uniform(0.3, 1.4)), float(rng.uniform(0.3, 1.2))
    median, judge_median = float(np.exp(rng.uniform(6.5, 8.5))), float(np.exp(rng.uniform(6.0, 8.3)))
    correlation, growth = float(rng.uniform(0.1, 0.8)), float(np.exp(rng.uniform(-0.2, 0.7)))
    prompts = int(np.clip(gpus // 2, 16, 64))
    workload = Workload(
        LengthSpec(median, sigma, 15360, correlation, growth),
        LengthSpec(judge_median, judge_sigma, 20480, correlation / 2),
        prompts_per_step=prompts,
        responses_per_prompt=8,
        mini_batch_prompts=prompts // 4,
    )
    scenario = Cluster.of(CostFile.read(), *pair, gpus, GPU).scenario(workload, staleness=staleness, seed=case)
    return scenario, {
        "seed": case,
        "policy": pair[0],
        "gpus": gpus,
        "staleness": staleness,
        "median": round(median),
        "sigma": round(sigma, 2),
        "judge_median": round(judge_median),
        "judge_sigma": round(judge_sigma, 2),
    }


def play(case: int) -> dict[str, Any]:
    """Tokens a second of everybody in one case."""
    scenario, row = draw(case)
    # Steps come in bunches of staleness + 1: only whole bunches can be compared.
    bunch = scenario.staleness + 1
    warmup = 2 * bunch
    steps = warmup + whole_bunches(scenario, max(6, 4 * bunch))
    unseen = replace(scenario, seed=scenario.seed + UNSEEN_SEED)

    def find(deployment: Deployment, *also: Split, tries: int = TRIES) -> Split:
        return best_split(scenario, deployment, tries=tries, also=also)

    def measure(deployment: Deployment, split: Split) -> SimResult:
        return simulate(unseen, deployment, split, steps=steps, warmup=warmup)

    pools = find(Deployment.DISAGGREGATED)
    harmonic_split = find(Deployment.HARMONIC, pools)
    harmonic = measure(Deployment.HARMONIC, harmonic_split)
    ahead = measure(Deployment.LOOKAHEAD, find(Deployment.LOOKAHEAD, harmonic_split, pools, tries=LOOKAHEAD_TRIES))
    fixed = max(
        (measure(Deployment.DISAGGREGATED, pools), measure(Deployment.COLOCATED, find(Deployment.COLOCATED))),
        key=lambda result: result.tokens_per_s,
    )
    for name, result in (("harmonic", harmonic), ("lookahead", ahead)):
        row[f"{name}_shifts_per_step"] = round(result.shifts / (steps - warmup), 1)
        row[f"{name}_bound_fraction"] = round(result.bound_fraction, 4)
    for name, other in (("harmonic", harmonic), ("fixed", fixed)):
        row[f"over_{name}"] = round(ahead.tokens_per_s / other.tokens_per_s, 4)
        row[f"over_{name}_within"] = [round(end, 4) for end in interval(ahead.steps_s, other.steps_s, bunch)]
    row["split"], row["harmonic_split"] = str(ahead.split), str(harmonic_split)
    row["fixed"], row["fixed_split"] = str(fixed.deployment), str(fixed.split)
    return row


def interval(ours_s: Sequence[float], other_s: Sequence[float], bunch: int) -> tuple[float, float]:
    """Confidence interval of how many times as fast we are: Student's t on the logarithms of the ratios bunch by
    bunch. Both had the same lengths to make in the same step."""
    ours, other = (np.asarray(steps_s).reshape(-1, bunch).sum(axis=1) for steps_s in (ours_s, other_s))
    ratios = np.log(other / ours)
    error = float(stats.sem(ratios)) * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(ratios) - 1))
    return float(np.exp(ratios.mean() - error)), float(np.exp(ratios.mean() + error))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cases come to together."""
    over, fixed = (np.array([row[f"over_{name}"] for row in rows]) for name in ("harmonic", "fixed"))
    heavy = np.array([row["sigma"] >= HEAVY_SIGMA for row in rows])
    return {
        "benchmark": "simulated_random",
        "title": "The look-ahead planner on random workloads",
        "simulated": True,
        "cases": len(rows),
        "confidence": CONFIDENCE,
        "worst_over_harmonic": float(over.min()),
        "median_over_harmonic": float(np.median(over)),
        "mean_over_harmonic": float(np.exp(np.log(over).mean())),
        "share_at_least_harmonic_less_1_percent": float((over >= 1 - MAY_MISS["harmonic"]).mean()),
        "median_over_harmonic_heavy_tail": float(np.median(over[heavy])) if heavy.any() else None,
        "worst_over_best_fixed": float(fixed.min()),
        "median_over_best_fixed": float(np.median(fixed)),
        "mean_over_best_fixed": float(np.exp(np.log(fixed).mean())),
        "share_at_least_fixed_less_2_percent": float((fixed >= 1 - MAY_MISS["fixed"]).mean()),
        "clearly_lost_to": {name: clearly(rows, name, lost=True) for name in MAY_MISS},
        "clearly_won_over": {name: clearly(rows, name, lost=False) for name in MAY_MISS},
        "lost": sorted(row["seed"] for row in rows if any(row[f"over_{n}"] < 1 - m for n, m in MAY_MISS.items())),
    }


MAY_MISS = {"harmonic": 0.01, "fixed": 0.02}
"""By so much the planner may be slower before a case counts as lost."""


def clearly(rows: list[dict[str, Any]], name: str, *, lost: bool) -> list[int]:
    """Seeds of the cases whose whole interval is beyond what may be missed, or above 1."""
    ends = {row["seed"]: row[f"over_{name}_within"] for row in rows}
    return sorted(seed for seed, (low, high) in ends.items() if (high < 1 - MAY_MISS[name] if lost else low > 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--resume", action="store_true", help="keep the cases that the file has, add the others")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "simulated_random.json")
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.resume and options.out.exists() else {}
    rows, before_s = before.get("rows", []), before.get("computed_in_s", 0)
    done = {row["seed"] for row in rows}
    cases = [case for case in range(options.cases) if case not in done]
    began_s, document = time.perf_counter(), before
    with ProcessPoolExecutor(options.processes) as pool:
        for row in track(pool.map(play, cases), "simulating", total=len(cases)):
            rows.append(row)
            computed_in_s = before_s + round(time.perf_counter() - began_s)
            document = {**summary(rows), "computed_in_s": computed_in_s, "rows": rows}
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    print({key: value for key, value in document.items() if not isinstance(value, list | dict)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
