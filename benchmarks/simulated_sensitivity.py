"""How far the simulated gains depend on what is assumed: one assumption at a time is changed.

    python benchmarks/simulated_sensitivity.py      # about 15 minutes of one core

One pair on 128 GPUs at staleness 2, every deployment at the split that is like the published ones. Published are decode
costs and ranges of gains; lengths, shift costs and the speed of training are ours. Writes
``benchmarks/results/simulated_sensitivity.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.progress import track  # noqa: E402

from benchmarks.simulated_cluster import GPUS, PAIRS, PUBLISHED, published_like, scenario_of  # noqa: E402
from verl_pivot.sim.deployments import Deployment  # noqa: E402
from verl_pivot.sim.result import simulate  # noqa: E402
from verl_pivot.sim.scenario import Scenario  # noqa: E402
from verl_pivot.sim.workload import LengthSpec, Workload  # noqa: E402

PAIR, STALENESS = PAIRS[1], 2
RESPONSE, JUDGEMENT = LengthSpec(3000, 0.9, 15360, 0.5), LengthSpec(2500, 0.7, 20480, 0.3)
BASE = "as assumed"


def variants() -> dict[str, Scenario]:
    """What is changed -> the scenario with that change alone."""

    def of(response: LengthSpec = RESPONSE, judgement: LengthSpec = JUDGEMENT) -> Scenario:
        return scenario_of(PAIR, Workload(response, judgement), STALENESS)

    base = of()
    found = {BASE: base}
    for factor in (0.5, 2.0):
        found[f"response median x {factor:g}"] = of(replace(RESPONSE, median_tokens=RESPONSE.median_tokens * factor))
        longer = replace(JUDGEMENT, median_tokens=JUDGEMENT.median_tokens * factor)
        found[f"judgement median x {factor:g}"] = of(judgement=longer)
    for sigma in (0.3, 1.2):
        found[f"response sigma {sigma:g}"] = of(replace(RESPONSE, sigma=sigma))
        found[f"judgement sigma {sigma:g}"] = of(judgement=replace(JUDGEMENT, sigma=sigma))
    found["responses of a prompt unlike each other"] = of(replace(RESPONSE, correlation=0.0))
    for factor in (0.3, 3.0):
        costs = base.costs
        shifts = {n: getattr(costs, n) * factor for n in ("inference_shift_s", "to_train_s", "from_train_s")}
        found[f"shifts x {factor:g}"] = replace(base, costs=replace(costs, **shifts))
    for factor in (0.5, 2.0):
        train = replace(base.train, slot_s_per_token=base.train.slot_s_per_token * factor)
        found[f"training takes x {factor:g}"] = replace(base, train=train)
    return dict(sorted(found.items(), key=lambda item: item[0] != BASE))


def play(variant: tuple[str, Scenario]) -> dict[str, Any]:
    """Gains of both planners over each deployment with a published range."""
    name, scenario = variant
    bunch = scenario.staleness + 1
    split = published_like(scenario.slots)
    results = {
        deployment: simulate(scenario, deployment, split, steps=6 * bunch, warmup=2 * bunch)
        for deployment in (*PUBLISHED, Deployment.HARMONIC, Deployment.LOOKAHEAD)
    }
    row: dict[str, Any] = {"changed": name, "split": str(split)}
    for planner, ours in (("harmonic", Deployment.HARMONIC), ("lookahead", Deployment.LOOKAHEAD)):
        row[f"{planner}_bound_fraction"] = round(results[ours].bound_fraction, 4)
        for rival in PUBLISHED:
            gain = results[ours].tokens_per_s / results[rival].tokens_per_s
            row[f"{planner}_over_{rival}"] = round(gain, 4)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    results = REPOSITORY / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results / "simulated_sensitivity.json")
    options = parser.parse_args()
    began_s, cases = time.perf_counter(), variants()
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(track(pool.map(play, cases.items()), "simulating", total=len(cases)))
    document = {
        "benchmark": "simulated_sensitivity",
        "title": "What the simulated gains depend on",
        "simulated": True,
        "policy": PAIR[0],
        "judge": PAIR[1],
        "gpus": GPUS,
        "staleness": STALENESS,
        "assumed": {"response": vars(RESPONSE), "judgement": vars(JUDGEMENT)},
        "published": {str(rival): list(limits) for rival, limits in PUBLISHED.items()},
        "computed_in_s": round(time.perf_counter() - began_s),
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
