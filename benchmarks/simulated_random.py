"""Planners on random workloads: the look-ahead planner against the harmonic rule and the best fixed deployment.

    python benchmarks/simulated_random.py                # 200 workloads, about two hours of one core
    python benchmarks/simulated_random.py --cases 20     # the first 20 of them
    python benchmarks/simulated_random.py --resume       # those that the result does not have yet

Clusters of 8 to 256 GPUs, any of the published pairs, any tail, staleness 0 to 4; case ``n`` is drawn from seed ``n``.
Both planners get the same two splits and count at the better one: the best found for the harmonic rule, and the best
found for fixed pools. Fixed deployments get the best split found for each. Every case is in the result, the lost ones
too: ``benchmarks/results/simulated_random.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.progress import track  # noqa: E402

from benchmarks.simulated_cluster import GPU, PAIRS  # noqa: E402
from verl_pivot.sim.cluster import Cluster  # noqa: E402
from verl_pivot.sim.deployments import Deployment, Split  # noqa: E402
from verl_pivot.sim.models import CostFile  # noqa: E402
from verl_pivot.sim.result import SimResult, simulate  # noqa: E402
from verl_pivot.sim.scenario import Scenario  # noqa: E402
from verl_pivot.sim.search import best_split  # noqa: E402
from verl_pivot.sim.workload import LengthSpec, Workload  # noqa: E402

TRIES = 5
"""Splits for each search."""
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
    warmup, steps = 2 * bunch, 2 * bunch + max(3, 2 * bunch)
    steps_tried = 2 * bunch + max(3, bunch)

    def play_one(deployment: Deployment, split: Split) -> SimResult:
        return simulate(scenario, deployment, split, steps=steps, warmup=warmup)

    best = {d: best_split(scenario, d, tries=TRIES, steps=steps_tried) for d in FIXED}
    fixed = max(play_one(deployment, split).tokens_per_s for deployment, split in best.items())
    pools = best[Deployment.DISAGGREGATED]
    splits = {best_split(scenario, Deployment.HARMONIC, tries=TRIES, steps=steps_tried, also=[pools]), pools}
    harmonic, ahead = (
        max((play_one(deployment, split) for split in splits), key=lambda result: result.tokens_per_s)
        for deployment in (Deployment.HARMONIC, Deployment.LOOKAHEAD)
    )
    for name, result in (("harmonic", harmonic), ("lookahead", ahead)):
        row[f"{name}_shifts_per_step"] = round(result.shifts / (steps - warmup), 1)
        row[f"{name}_bound_fraction"] = round(result.bound_fraction, 4)
    row["over_harmonic"] = round(ahead.tokens_per_s / harmonic.tokens_per_s, 4)
    row["over_fixed"] = round(ahead.tokens_per_s / fixed, 4)
    row["split"] = str(ahead.split)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cases come to together."""
    over = np.array([row["over_harmonic"] for row in rows])
    fixed = np.array([row["over_fixed"] for row in rows])
    heavy = np.array([row["sigma"] >= HEAVY_SIGMA for row in rows])
    return {
        "benchmark": "simulated_random",
        "title": "The look-ahead planner on random workloads",
        "simulated": True,
        "cases": len(rows),
        "worst_over_harmonic": float(over.min()),
        "median_over_harmonic": float(np.median(over)),
        "mean_over_harmonic": float(np.exp(np.log(over).mean())),
        "share_at_least_harmonic_less_1_percent": float((over >= 0.99).mean()),
        "median_over_harmonic_heavy_tail": float(np.median(over[heavy])) if heavy.any() else None,
        "worst_over_best_fixed": float(fixed.min()),
        "median_over_best_fixed": float(np.median(fixed)),
        "share_at_least_fixed_less_2_percent": float((fixed >= 0.98).mean()),
        "lost": sorted(row["seed"] for row in rows if row["over_harmonic"] < 0.99 or row["over_fixed"] < 0.98),
    }


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
    print({key: value for key, value in document.items() if key not in ("rows", "lost")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
