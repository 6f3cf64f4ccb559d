"""Four deployments of GRPO with a generative reward model on one machine, on four slots of half a core each.

    python benchmarks/deployments_cpu.py

Measures verl's colocated deployment, its disaggregated one (the best of several splits of the slots), the same with
``enable_switch``, and resource_shift; writes ``benchmarks/results/deployments_cpu.json``. ``--only NAME`` measures a
part again and leaves the rest of the file as it is. Needs the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.deployments import results  # noqa: E402
from benchmarks.deployments.launch import DeploymentFailed, DeploymentRun, Limits  # noqa: E402
from benchmarks.deployments.variants import SLOTS, SPLITS, Variant  # noqa: E402
from benchmarks.deployments.workload import Workload, make_assets  # noqa: E402

GROUPS = ("verl_colocated", "verl_disaggregated", "verl_enable_switch", "resource_shift")
TRIAL_STEPS, TRIAL_WARMUP = 2, 1


def resource_shift(staleness: int, train: int) -> Variant:
    """Slots begin with one judge; they move from there."""
    return Variant("resource_shift", train, rollout=SLOTS - train - 1, judge=1, staleness=staleness)


class Benchmark:
    """Runs what was asked for, one deployment at a time, and keeps the document on disk up to date."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._workload = Workload()
        self._assets = make_assets(self._workload, REPOSITORY / "outputs" / "benchmarks" / "assets")
        self._runs = REPOSITORY / "outputs" / "benchmarks" / "runs"
        self.failed: list[str] = []
        self.document = results.new_document(self._workload, options.share, options.steps, options.warmup)
        if options.only and options.out.exists():
            earlier = json.loads(options.out.read_text())
            if results.same_conditions(self.document, earlier):
                for part in ("trials", "deployments"):
                    self.document[part] = earlier[part]

    def run(self) -> None:
        """Groups in order; a deployment that fails is reported and left out."""
        if self._wanted("verl_colocated"):
            self._measure(Variant("colocated", SLOTS))
        if self._wanted("verl_disaggregated"):
            self._measure_best(list(SPLITS))
        if self._wanted("verl_enable_switch"):
            self._measure(self._switching())
        if self._wanted("resource_shift"):
            for staleness in (0, 1):
                self._measure_best([resource_shift(staleness, train) for train in self._options.train])

    def _wanted(self, group: str) -> bool:
        return not self._options.only or group in self._options.only

    def _switching(self) -> Variant:
        """``enable_switch`` on the split that did best among those with rollout engines on training slots."""
        trials = self.document["trials"]
        tried = {split.name: split for split in SPLITS if split.hybrid and split.name in trials}
        split = tried[results.best({name: trials[name] for name in tried})] if tried else SPLITS[0]
        return Variant("enable_switch", split.train, split.rollout, split.judge)

    def _measure_best(self, candidates: list[Variant]) -> None:
        """Short runs of all candidates, a full one of the best."""
        if len(candidates) > 1:
            for variant in candidates:
                self._trial(variant)
            trials = {v.name: self.document["trials"][v.name] for v in candidates}
            if all("error" in trial for trial in trials.values()):
                return
            candidates = [v for v in candidates if v.name == results.best(trials)]
        self._measure(candidates[0])

    def _trial(self, variant: Variant) -> None:
        try:
            runs, details = self._runs_of(variant, TRIAL_STEPS, TRIAL_WARMUP, 1)
        except DeploymentFailed as error:
            self._report_failure(variant, error)
            self.document["trials"][variant.name] = {"error": str(error)}
        else:
            self.document["trials"][variant.name] = results.entry(variant, runs, self._options.share, details)
        self.save()

    def _measure(self, variant: Variant) -> None:
        deployments = self.document["deployments"]
        for name in [name for name, entry in deployments.items() if _replaces(variant, entry, name)]:
            del deployments[name]
        try:
            runs, details = self._runs_of(variant, self._options.steps, self._options.warmup, self._options.repeat)
        except DeploymentFailed as error:
            self._report_failure(variant, error)
        else:
            deployments[variant.name] = results.entry(variant, runs, self._options.share, details)
        self.save()

    def _runs_of(self, variant: Variant, steps: int, warmup: int, repeat: int) -> tuple[list[Any], dict[str, Any]]:
        timed, details = [], {}
        limits = Limits(self._options.start_timeout, self._options.step_timeout)
        for number in range(repeat):
            title = f"[bold]{variant.name}[/]" + (f" ({number + 1} of {repeat})" if repeat > 1 else "")
            began_s = time.monotonic()
            with self._console.status(title) as status:
                outcome = DeploymentRun(
                    variant,
                    self._workload,
                    self._assets,
                    self._runs / variant.name,
                    warmup + steps,
                    self._options.share,
                    limits,
                    lambda text, title=title, status=status: status.update(f"{title}: {text}"),
                ).execute()
            timed.append(outcome.steps[warmup:])
            details = {
                "start_s": outcome.start_s,
                "memory_gib": outcome.memory_bytes / 2**30,
                "shares": outcome.shares,
                "observed": results.observed_figures(outcome.observed),
            }
            seconds = [f"{step.step_s:.1f}" for step in outcome.steps]
            self._console.print(
                f"{title}: start {outcome.start_s:.0f} s, steps {', '.join(seconds)} s "
                f"(first {warmup} not timed), {time.monotonic() - began_s:.0f} s in all"
            )
        return timed, details

    def _report_failure(self, variant: Variant, error: DeploymentFailed) -> None:
        self.failed.append(variant.name)
        self._console.print(f"[bold red]failed[/] {error}")

    def save(self) -> None:
        self._options.out.parent.mkdir(parents=True, exist_ok=True)
        self._options.out.write_text(json.dumps(results.finish(self.document), indent=1) + "\n")


def _replaces(variant: Variant, entry: dict[str, Any], name: str) -> bool:
    """A new measurement of a kind replaces the earlier one, whatever split it had."""
    if variant.kind != "resource_shift" or entry["kind"] != "resource_shift":
        return bool(entry["kind"] == variant.kind)
    return name.startswith(f"resource_shift_staleness{variant.staleness}_")


def table(document: dict[str, Any]) -> Table:
    """The deployments, for the console."""
    columns = ("tokens/s", "step s", "min", "max", "slots busy", "CPU s / 1k tokens", "bound", "staleness")
    shown = Table(title=document["title"])
    shown.add_column("deployment")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, entry in document["deployments"].items():
        step, busy = entry["step_s"], entry["slot_busy_share"]
        shown.add_row(
            name,
            f"{entry['response_tokens_per_s']:.0f}",
            f"{step['mean']:.1f}",
            f"{step['min']:.1f}",
            f"{step['max']:.1f}",
            " ".join(f"{share:.0%}" for share in busy),
            f"{entry['cpu_s_per_1000_tokens']:.2f}",
            f"{entry['bound_fraction']:.0%}",
            "-" if entry["staleness_mean"] is None else f"{entry['staleness_mean']:.2f}",
        )
    return shown


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare deployments of GRPO with a generative reward model on CPU.")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each deployment")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure this again, keep the rest")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "deployments_cpu.json")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each deployment; their steps are pooled")
    parser.add_argument("--share", type=float, default=0.5, help="cores of one slot")
    parser.add_argument("--train", type=int, nargs="+", default=[1, 2], help="training pools of resource_shift to try")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds a deployment may take to start")
    parser.add_argument("--step-timeout", type=float, default=240.0, help="seconds a step may take")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 1 or options.repeat < 1:
        parser.error("--steps, --warmup and --repeat must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    console = Console()
    benchmark = Benchmark(parse(arguments), console)
    benchmark.run()
    console.print(table(benchmark.document))
    for name, ratio in benchmark.document["ratios"].items():
        console.print(f"{name}: {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
