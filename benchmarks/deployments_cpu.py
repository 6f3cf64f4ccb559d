"""Four deployments of GRPO with a generative reward model on one machine, on four slots of half a core each.

    python benchmarks/deployments_cpu.py

Measures verl's colocated deployment, its disaggregated one in several splits of the slots, the best of them with
``enable_switch``, and resource_shift with several training pools; writes
``benchmarks/results/deployments_cpu.json``. ``--only NAME`` measures a part again and leaves the rest of the file as
it is. Needs the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.deployments import results  # noqa: E402
from benchmarks.deployments.launch import DeploymentFailed, DeploymentRun, Limits  # noqa: E402
from benchmarks.deployments.variants import SLOTS, SPLITS, Variant, resource_shift, switching  # noqa: E402
from benchmarks.deployments.workload import Workload, make_assets  # noqa: E402

BEGINNINGS = ("verl_colocated", "verl_disaggregated", "verl_enable_switch", "resource_shift")
TRAIN_POOLS = (2, 4)
"""Training pools of resource_shift to try. The batch does not divide by 3, and one slot trains longer than the other
three need for their work."""


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
                self.document["deployments"] = earlier["deployments"]

    def run(self) -> None:
        """One after another; a deployment that fails is reported and left out."""
        for variant in self._variants():
            if not self._options.only or variant.name.startswith(tuple(self._options.only)):
                self._measure(variant)

    def _variants(self) -> Iterator[Variant]:
        """All deployments; which split ``enable_switch`` takes depends on what was measured before it."""
        yield Variant("colocated", SLOTS)
        yield from SPLITS
        yield switching(self.document["deployments"])
        for staleness in (0, 1):
            for train in TRAIN_POOLS:
                yield resource_shift(staleness, train)

    def _measure(self, variant: Variant) -> None:
        deployments = self.document["deployments"]
        for name in [name for name, entry in deployments.items() if _replaces(variant, name, entry)]:
            del deployments[name]
        try:
            runs, details = self._runs_of(variant)
        except DeploymentFailed as error:
            self.failed.append(variant.name)
            self._console.print(f"[bold red]failed[/] {error}")
        else:
            deployments[variant.name] = results.entry(variant, runs, self._options.share, details)
        self.save()

    def _runs_of(self, variant: Variant) -> tuple[list[Any], dict[str, Any]]:
        steps, warmup, repeat = self._options.steps, self._options.warmup, self._options.repeat
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
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "deployments_cpu.json")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each deployment; their steps are pooled")
    parser.add_argument("--share", type=float, default=0.5, help="cores of one slot")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds a deployment may take to start")
    parser.add_argument("--step-timeout", type=float, default=240.0, help="seconds a step may take")
    options = parser.parse_args(arguments)
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
