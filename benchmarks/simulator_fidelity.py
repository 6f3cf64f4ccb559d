"""Does the simulator say what was measured? The CPU benchmark's deployments, simulated from costs fitted to one run.

    python benchmarks/simulator_fidelity.py                      # with the costs that are kept in the repository
    python benchmarks/simulator_fidelity.py --fit RUN --speed S  # fit them anew to a run of deployments_cpu.py

The same prompts and imposed lengths as in ``benchmarks/results/deployments_cpu.json``, with whose step times at equal
machine speed it compares. Writes ``benchmarks/results/simulator_fidelity.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from benchmarks.deployments import workload as real  # noqa: E402
from verl_pivot.core.cost_book import CostBook  # noqa: E402
from verl_pivot.core.settings import PlannerSettings  # noqa: E402
from verl_pivot.core.snapshot import Role  # noqa: E402
from verl_pivot.observe.events import read_events  # noqa: E402
from verl_pivot.sim.deployments import Deployment, Split  # noqa: E402
from verl_pivot.sim.draw import Draws  # noqa: E402
from verl_pivot.sim.fit import fit_run  # noqa: E402
from verl_pivot.sim.result import SimResult, measure, run  # noqa: E402
from verl_pivot.sim.scenario import Scenario  # noqa: E402
from verl_pivot.sim.workload import LengthSpec, Workload  # noqa: E402

COSTS = REPOSITORY / "benchmarks" / "costs" / "cpu_half_core.json"
MEASURED = REPOSITORY / "benchmarks" / "results" / "deployments_cpu.json"
OUT = REPOSITORY / "benchmarks" / "results" / "simulator_fidelity.json"
WITHIN = 0.15
"""The miss up to which a simulated step time counts as right."""
KV_TOKENS = 80_000
"""128 MiB of fp32 keys and values, 3 layers, 1 KV head of 64."""
PLANNER = PlannerSettings(interval_s=0.25, cooldown_s=1.0, immunity_s=1.0)


@dataclass(frozen=True)
class Counterpart:
    """A measured deployment and what it is in the simulator."""

    measured: str
    """Name under ``deployments`` in the measured document."""
    deployment: Deployment
    split: Split
    staleness: int
    mini_batches: int
    """Training takes so many batches of a step as they become ready."""


def counterparts(document: Mapping[str, Any]) -> list[Counterpart]:
    """The best of each family that was measured."""
    best = document["best"]
    found = [Counterpart(best["verl_colocated"], Deployment.COLOCATED, Split(0, 4, 0), 0, 1)]
    for family, deployment in (
        ("verl_disaggregated", Deployment.DISAGGREGATED),
        ("verl_enable_switch", Deployment.ENABLE_SWITCH),
    ):
        slots = document["deployments"][best[family]]["slots"]
        split = Split(slots["train"], slots["rollout"], slots["genrm"])
        found.append(Counterpart(best[family], deployment, split, 1, 4))
    for staleness in (0, 1):
        name = best[f"resource_shift_staleness{staleness}"]
        slots = document["deployments"][name]["slots"]
        split = Split(slots["train"], slots["rollout"], slots["genrm"])
        # As that benchmark does: with all slots in the training pool every further lease would stop generation.
        found.append(Counterpart(name, Deployment.HARMONIC, split, staleness, 1 if split.train == split.slots else 4))
    return found


def sim_workload(work: real.Workload, mini_batches: int) -> Workload:
    """Sizes alone: the lengths are given, not drawn."""
    return Workload(
        LengthSpec(work.rollout.p50_tokens, work.rollout.sigma, work.rollout.max_tokens),
        LengthSpec(work.judge.p50_tokens, work.judge.sigma, work.judge.max_tokens),
        prompts_per_step=work.prompts_per_step,
        responses_per_prompt=work.responses_per_prompt,
        mini_batch_prompts=work.prompts_per_step // mini_batches,
        prompt_tokens=40,
        judge_template_tokens=real.JUDGE_TEMPLATE_TOKENS,
        judge_prompt_tokens_max=2048,
        distinct_prompts=work.dataset_prompts,
    )


def given_lengths(work: real.Workload, scenario: Scenario, steps: int) -> Draws:
    """The lengths that the benchmark imposes, prompt by prompt."""
    shape = (steps, work.prompts_per_step, work.responses_per_prompt)
    responses, judgements = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    prompt_of = (np.arange(steps * work.prompts_per_step) % work.dataset_prompts).reshape(shape[:2])
    for (step, prompt), index in np.ndenumerate(prompt_of):
        text = real.question(int(index), work.seed)
        for session in range(work.responses_per_prompt):
            tokens = work.rollout.tokens(text, session)
            responses[step, prompt, session] = tokens
            judgements[step, prompt, session] = work.judge.tokens(text, tokens)
    return Draws(scenario, responses, judgements, prompt_of)


def simulate(book: CostBook, part: Counterpart, steps: int, warmup: int) -> SimResult:
    work = real.Workload()
    load = sim_workload(work, part.mini_batches)
    scenario = Scenario.from_book(part.measured, book, 4, load, staleness=part.staleness)
    draws = given_lengths(work, scenario, steps + part.staleness)
    return measure(run(scenario, part.deployment, part.split, steps=steps, settings=PLANNER, draws=draws), warmup)


def fit(folder: Path) -> CostBook:
    work = real.Workload()
    responses = work.expected_tokens(8)["response_tokens_per_step"] / work.prompts_per_step / work.responses_per_prompt
    return fit_run(
        read_events(folder),
        kv_tokens=dict.fromkeys((Role.ROLLOUT, Role.GENRM), KV_TOKENS),
        max_sequences=dict.fromkeys((Role.ROLLOUT, Role.GENRM), work.max_num_seqs),
        prompt_tokens={Role.ROLLOUT: 40.0, Role.GENRM: real.JUDGE_TEMPLATE_TOKENS + responses},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fit", type=Path, metavar="RUN", help="folder of a run with its event log; rewrites the costs"
    )
    parser.add_argument("--speed", type=float, help="machine speed of that run, from the measured document")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    if options.fit:
        if not options.speed or options.speed <= 0:
            parser.error("--fit needs --speed, the machine_speed of that run, above 0")
        kept = {"machine_speed": options.speed, **fit(options.fit).to_json()}
        COSTS.parent.mkdir(exist_ok=True)
        COSTS.write_text(json.dumps(kept, indent=1) + "\n")
    kept = json.loads(COSTS.read_text())
    book, speed = CostBook.from_json(kept), float(kept["machine_speed"])
    steps, warmup = measured["warmup_steps"] + measured["timed_steps"], measured["warmup_steps"]
    rows = [_row(part, measured, simulate(book, part, steps, warmup), speed) for part in counterparts(measured)]
    order = [[r["deployment"] for r in sorted(rows, key=lambda r: r[key])] for key in ("measured_s", "simulated_s")]
    document = {
        "benchmark": "simulator_fidelity",
        "title": "Simulated and measured step times of the CPU benchmark",
        "simulated": True,
        "notes": [
            "Costs are fitted to one run of resource_shift; all five deployments are simulated from them. Seconds are "
            "at machine speed 1.",
        ],
        "within": WITHIN,
        "within_all": all(abs(row["miss"]) <= WITHIN for row in rows),
        "same_ranking": order[0] == order[1],
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['deployment']:45s} {row['measured_s']:7.1f} s {row['simulated_s']:7.1f} s {row['miss']:+.0%}")
    print(f"same ranking: {document['same_ranking']}")
    return 0


def _row(part: Counterpart, measured: Mapping[str, Any], result: SimResult, speed: float) -> dict[str, Any]:
    """Step times at machine speed 1, from the throughput that the measured document gives at that speed."""
    entry = measured["deployments"][part.measured]
    real_s = entry["response_tokens"] / entry["steps"] / entry["equal_speed_tokens_per_s"]
    simulated_s = result.step_s * speed
    return {
        "deployment": part.measured,
        "measured_s": real_s,
        "simulated_s": simulated_s,
        "miss": simulated_s / real_s - 1,
        "shifts": result.shifts,
    }


if __name__ == "__main__":
    sys.exit(main())
