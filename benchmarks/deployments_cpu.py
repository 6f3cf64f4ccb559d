"""Four deployments of GRPO with a generative reward model on one machine, on four slots of half a core each.

    python benchmarks/deployments_cpu.py
    python benchmarks/deployments_cpu.py --planners --repeat 2    # the planners of resource_shift alone, in turns

Measures verl's colocated deployment, its disaggregated one in several splits of the slots, the best of them with
``enable_switch``, and resource_shift with several training pools; writes
``benchmarks/results/deployments_cpu.json``. ``--only NAME`` measures a part again and leaves the rest of the file as
it is. ``--planners`` lets the look-ahead planner and the harmonic rule take turns on the same split, and writes
``benchmarks/results/planners_cpu.json``. Needs the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.deployments import results  # noqa: E402
from benchmarks.deployments.launch import DeploymentFailed, DeploymentRun, Limits  # noqa: E402
from benchmarks.deployments.variants import SLOTS, SPLITS, Planner, Variant, resource_shift, switching  # noqa: E402
from benchmarks.deployments.workload import Workload, make_assets  # noqa: E402

BEGINNINGS = ("verl_colocated", "verl_disaggregated", "verl_enable_switch", "resource_shift")
TRAIN_POOLS = (2, 4)
"""Training pools of resource_shift to try. The batch does not divide by 3, and one slot trains longer than the other
three need for their work."""
PLANNERS: tuple[Planner, ...] = ("harmonic", "lookahead")
PLANNERS_ON = ((0, 4), (1, 2))
"""(staleness, training pool) on which planners are compared: those with which the harmonic rule did best."""
RESULTS = REPOSITORY / "benchmarks" / "results"


class Benchmark:
    """Runs what was asked for, one deployment at a time, and keeps the document on disk up to date."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._workload = Workload()
        self._assets = make_assets(self._workload, REPOSITORY / "outputs" / "benchmarks" / "assets")
        self._runs = REPOSITORY / "outputs" / "benchmarks" / "runs"
        self.failed: list[str] = []
        what = "two planners" if options.planners else "four deployments"
        self.document = results.new_document(self._workload, options.share, options.steps, options.warmup, what)
        if options.only and options.out.exists():
            earlier = json.loads(options.out.read_text())
            if results.same_conditions(self.document, earlier):
                self.document["deployments"] = earlier["deployments"]

    def run(self) -> None:
        """One after another; a deployment that fails is reported and left out."""
        for turns in self._turns():
            wanted = [v for v in turns if not self._options.only or v.name.startswith(tuple(self._options.only))]
            if wanted:
                self._measure(wanted)

    def _turns(self) -> Iterator[Sequence[Variant]]:
        """All deployments, those together that take turns."""
        if self._options.planners:
            for staleness, train in PLANNERS_ON:
                yield [resource_shift(staleness, train, planner) for planner in PLANNERS]
            return
        yield [Variant("colocated", SLOTS)]
        yield from ([split] for split in SPLITS)
        yield [switching(self.document["deployments"])]  # which split it takes depends on what was measured before it
        for staleness in (0, 1):
            for train in TRAIN_POOLS:
                yield [resource_shift(staleness, train)]

    def _measure(self, turns: Sequence[Variant]) -> None:
        deployments = self.document["deployments"]
        for variant in turns:
            for name in [name for name, entry in deployments.items() if _replaces(variant, name, entry)]:
                del deployments[name]
        runs: dict[str, list[Any]] = {variant.name: [] for variant in turns}
        for number in range(self._options.repeat):
            for variant in turns:
                try:
                    steps, details = self._run_of(variant, number)
                except DeploymentFailed as error:
                    self.failed.append(variant.name)
                    self._console.print(f"[bold red]failed[/] {error}")
                else:
                    runs[variant.name].append(steps)
                    entry = results.entry(variant, runs[variant.name], self._options.share, details)
                    deployments[variant.name] = entry
                self.save()

    def _run_of(self, variant: Variant, number: int) -> tuple[list[Any], dict[str, Any]]:
        """Timed steps of one run, and what else there is to say of it."""
        steps, warmup, repeat = self._options.steps, self._options.warmup, self._options.repeat
        limits = Limits(self._options.start_timeout, self._options.step_timeout)
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
                lambda text: status.update(f"{title}: {text}"),
            ).execute()
        seconds = [f"{step.step_s:.1f}" for step in outcome.steps]
        self._console.print(
            f"{title}: start {outcome.start_s:.0f} s, steps {', '.join(seconds)} s "
            f"(first {warmup} not timed), {time.monotonic() - began_s:.0f} s in all"
        )
        return outcome.steps[warmup:], {
            "start_s": outcome.start_s,
            "memory_gib": outcome.memory_bytes / 2**30,
            "shares": outcome.shares,
            "observed": results.observed_figures(outcome.observed),
        }

    def save(self) -> None:
        self._options.out.parent.mkdir(parents=True, exist_ok=True)
        self._options.out.write_text(json.dumps(results.finish(self.document), indent=1) + "\n")


def _replaces(variant: Variant, name: str, entry: dict[str, Any]) -> bool:
    """Whether a result of before goes when ``variant`` is measured: the same deployment, or ``enable_switch`` on
    another split."""
    return name == variant.name or variant.kind == entry["kind"] == "enable_switch"


def table(document: dict[str, Any]) -> Table:
    """The deployments, for the console."""
    columns = (
        "tokens/s",
        "equal speed",
        "step s",
        "min",
        "max",
        "slots busy",
        "outside",
        "CPU s / 1k tokens",
        "bound",
        "staleness",
    )
    shown = Table(title=document["title"])
    shown.add_column("deployment")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, entry in document["deployments"].items():
        step, busy = entry["step_s"], entry["slot_busy_share"]
        shown.add_row(
            name,
            f"{entry['response_tokens_per_s']:.0f}",
            f"{entry['equal_speed_tokens_per_s']:.0f}",
            f"{step['mean']:.1f}",
            f"{step['min']:.1f}",
            f"{step['max']:.1f}",
            " ".join(f"{share:.0%}" for share in busy),
            f"{entry['outside_cores']:.2f}",
            f"{entry['cpu_s_per_1000_tokens']:.2f}",
            f"{entry['bound_fraction']:.0%}",
            "-" if entry["staleness_mean"] is None else f"{entry['staleness_mean']:.2f}",
        )
    return shown


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare deployments of GRPO with a generative reward model on CPU.")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each deployment")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="measure deployments that begin with NAME, keep the rest"
    )
    parser.add_argument(
        "--planners", action="store_true", help="measure the planners of resource_shift alone, in turns"
    )
    parser.add_argument("--out", type=Path, help="default: deployments_cpu.json or planners_cpu.json of the results")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each deployment; their steps are pooled")
    parser.add_argument("--share", type=float, default=0.5, help="cores of one slot")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds a deployment may take to start")
    parser.add_argument("--step-timeout", type=float, default=240.0, help="seconds a step may take")
    options = parser.parse_args(arguments)
    options.out = options.out or RESULTS / ("planners_cpu.json" if options.planners else "deployments_cpu.json")
    if options.steps < 1 or options.warmup < 1 or options.repeat < 1:
        parser.error("--steps, --warmup and --repeat must be at least 1")
    for name in options.only or ():
        if not any(known.startswith(name) or name.startswith(known) for known in BEGINNINGS):
            parser.error(f"--only {name}: no deployment begins so; they begin with {', '.join(BEGINNINGS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # The same clean-up as for ctrl-C: no process of a deployment may survive.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    benchmark = Benchmark(parse(arguments), console)
    benchmark.run()
    console.print(table(benchmark.document))
    for name, ratio in benchmark.document["ratios"].items():
        console.print(f"{name}: {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
