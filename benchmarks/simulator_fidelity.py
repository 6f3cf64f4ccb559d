"""Does the simulator say what was measured? The CPU benchmark's deployments, simulated from costs fitted to its runs.

    python benchmarks/simulator_fidelity.py               # with the costs that are kept in the repository
    python benchmarks/simulator_fidelity.py --fit RUNS    # fit them anew to the runs that deployments_cpu.py left

The same prompts and imposed lengths as in ``benchmarks/results/deployments_cpu.json``, with whose step times at equal
machine speed it compares. Writes ``benchmarks/results/simulator_fidelity.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from benchmarks import fidelity_costs  # noqa: E402
from benchmarks.deployments import workload as real  # noqa: E402
from benchmarks.fidelity_measured import Measured  # noqa: E402
from verl_pivot.core.cost_book import CostBook  # noqa: E402
from verl_pivot.core.settings import PlannerSettings  # noqa: E402
from verl_pivot.core.snapshot import Role  # noqa: E402
from verl_pivot.sim.deployments import Deployment, Split  # noqa: E402
from verl_pivot.sim.draw import Draws  # noqa: E402
from verl_pivot.sim.result import measure, run  # noqa: E402
from verl_pivot.sim.scenario import Scenario  # noqa: E402
from verl_pivot.sim.simulation import Simulation  # noqa: E402
from verl_pivot.sim.workload import LengthSpec, Workload  # noqa: E402

COSTS = REPOSITORY / "benchmarks" / "costs" / "cpu_half_core.json"
MEASURED = REPOSITORY / "benchmarks" / "results" / "deployments_cpu.json"
OUT = REPOSITORY / "benchmarks" / "results" / "simulator_fidelity.json"
WITHIN = 0.15
"""The miss up to which a simulated step time counts as right."""
TRAINED_ALONE_AND_BESIDE = ("resource_shift_staleness0_train2", "resource_shift_staleness1_train2")
TRAINED_ON_ONE = "verl_disaggregated_train1_rollout2_judge1"
PLANNER = PlannerSettings(interval_s=0.25, cooldown_s=1.0, immunity_s=1.0)
NOTES = (
    "Costs are fitted to the event logs of the four runs of resource_shift together: decoding, prefill, training, "
    "shifts, publishing, and what it takes to hand a step's work on. Nothing is fitted to step times (though where "
    "training bounds the step, its spans fill nearly all of it), and nothing to verl's runs, whose engines, weight "
    "sync and sleeping are verl's own. Seconds are at machine speed 1.",
    "verl's colocated deployment hands its batch to the judge as a whole; in the simulation that takes as long as "
    "handing it to training.",
    "Other fits show how much depends on the runs that one has.",
)


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
        prompt_tokens=fidelity_costs.PROMPT_TOKENS,
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


def simulate(book: CostBook, part: Counterpart, steps: int) -> Simulation:
    if part.deployment is Deployment.COLOCATED:
        to_judge = Role.ROLLOUT, Role.GENRM
        book = replace(book, shift_s={**book.shift_s, to_judge: book.shift_s[to_judge] + book.collect_s})
    work = real.Workload()
    load = sim_workload(work, part.mini_batches)
    scenario = Scenario.from_book(part.measured, book, 4, load, staleness=part.staleness)
    draws = given_lengths(work, scenario, steps + part.staleness)
    return run(scenario, part.deployment, part.split, steps=steps, settings=PLANNER, draws=draws)


class Comparison:
    """Simulated beside measured."""

    def __init__(self, measured: Mapping[str, Any]) -> None:
        self._measured = Measured(measured)
        self._warmup = measured["warmup_steps"]
        self._steps = self._warmup + measured["timed_steps"]
        self.parts = counterparts(measured)

    def row(self, part: Counterpart, book: CostBook) -> dict[str, Any]:
        simulation = simulate(book, part, self._steps)
        result = measure(simulation, self._warmup)
        real_s = self._measured.step_s(part.measured)
        row = {
            "deployment": part.measured,
            "measured_s": real_s,
            "simulated_s": result.step_s,
            "miss": result.step_s / real_s - 1,
            "shifts": result.shifts,
        }
        if part.staleness == 0:  # else phases overlap
            row["phases_s"] = {
                "measured": self._measured.phases_s(part.measured),
                "simulated": _simulated_phases(simulation, self._warmup),
            }
        return row

    def explanations(self, rows: Sequence[Mapping[str, Any]], book: CostBook) -> list[str]:
        """What is behind the misses, in figures of the measured document."""
        measured = self._measured
        colocated = rows[0]
        short_s = colocated["measured_s"] - colocated["simulated_s"]
        ours = next(part.measured for part in self.parts if part.staleness == 0 and part is not self.parts[0])
        spent_s, ours_s = measured.core_s(colocated["deployment"]), measured.core_s(ours)
        alone_s, beside_s = (measured.phases_s(name)["training"] for name in TRAINED_ALONE_AND_BESIDE)
        return [
            f"verl's colocated deployment comes out {short_s:.1f} s short. Its processes use {spent_s:.0f} core-s a "
            f"step; those of {ours}, for the same work at the same staleness, {ours_s:.0f}. {measured.cores} cores "
            f"need {(spent_s - ours_s) / measured.cores:.1f} s for the difference. The simulator knows of a part, "
            f"the smaller batches of phases; not of what verl's engines and front ends use beyond ours.",
            f"Processes outside the slots share the machine's cores with them, which the simulator does not know: the "
            f"same training on two slots takes {alone_s:.1f} s a step where engines mostly rest meanwhile "
            f"({TRAINED_ALONE_AND_BESIDE[0]}), {beside_s:.1f} s beside busy ones ({TRAINED_ALONE_AND_BESIDE[1]}). "
            f"Costs fitted to both lie between, and the deployments that are bound by training come out equal, and "
            f"short.",
            f"Costs of training come from pools of two and four slots. By them one slot would take "
            f"{self._training_s(book, 1):.1f} s a step; measured ({TRAINED_ON_ONE}) were "
            f"{measured.phases_s(TRAINED_ON_ONE)['training']:.1f} s.",
        ]

    def clear_order(self) -> list[tuple[str, str]]:
        return self._measured.clear_order([part.measured for part in self.parts])

    def _training_s(self, book: CostBook, slots: int) -> float:
        """A step's training on a pool of any size."""
        work, entry = real.Workload(), self._measured.deployments[TRAINED_ON_ONE]
        responses = work.prompts_per_step * work.responses_per_prompt
        tokens = entry["response_tokens"] / entry["steps"] + responses * fidelity_costs.PROMPT_TOKENS
        batches = work.mini_batches_per_step
        return batches * book.train.update_s(tokens / batches, slots)


def _simulated_phases(simulation: Simulation, warmup: int) -> dict[str, float]:
    """Means over the steps after ``warmup``; at staleness 0, with one batch a step."""
    ends = [step.end_s for step in simulation.trainer.steps]
    steps = len(ends) - warmup
    spans = [span for span in simulation.trainer.spans if span[1] >= ends[warmup - 1]]
    spent = {
        name: sum(end - start for what, start, end in spans if what == name) / steps for name in ("update", "publish")
    }
    judging = 0.0
    if simulation.layout.deployment is Deployment.COLOCATED:
        began = sorted(
            {s.start_s for s in simulation.slots.shifts if s.target is Role.GENRM and s.start_s >= ends[warmup - 1]}
        )
        trained = [start for what, start, _ in spans if what == "update"]
        judging = sum(start - begin for begin, start in zip(began, trained, strict=True)) / steps
    return {
        "until training": (ends[-1] - ends[warmup - 1]) / steps - sum(spent.values()),
        "of it, judging after the last response": judging,
        "training": spent["update"],
        "new weights": spent["publish"],
    }


def compare(measured: Mapping[str, Any], costs: fidelity_costs.KeptCosts) -> dict[str, Any]:
    """The document."""
    comparison = Comparison(measured)
    rows = [comparison.row(part, costs.together) for part in comparison.parts]
    simulated_s = {row["deployment"]: row["simulated_s"] for row in rows}
    order = [[r["deployment"] for r in sorted(rows, key=lambda r: r[key])] for key in ("measured_s", "simulated_s")]
    clear = comparison.clear_order()
    return {
        "benchmark": "simulator_fidelity",
        "title": "Simulated and measured step times of the CPU benchmark",
        "simulated": True,
        "notes": [
            *NOTES,
            *comparison.explanations(rows, costs.together),
            *(f"Of the fit: {doubt}." for doubt in costs.doubts),
        ],
        "within": WITHIN,
        "within_all": all(abs(row["miss"]) <= WITHIN for row in rows),
        "same_ranking": order[0] == order[1],
        "clear_pairs": len(clear),
        "clear_pairs_reversed": [list(pair) for pair in clear if simulated_s[pair[0]] >= simulated_s[pair[1]]],
        "rows": rows,
        "other_fits": {
            name: {part.measured: comparison.row(part, book)["miss"] for part in comparison.parts}
            for name, book in costs.others.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, metavar="RUNS", help="folder of runs with event logs; rewrites the costs")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    if options.fit:
        fidelity_costs.refit(options.fit, measured, COSTS)
    document = compare(measured, fidelity_costs.KeptCosts.read(COSTS))
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        print(f"{row['deployment']:45s} {row['measured_s']:7.1f} s {row['simulated_s']:7.1f} s {row['miss']:+.0%}")
    print(f"same ranking: {document['same_ranking']}; clear pairs reversed: {document['clear_pairs_reversed']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
