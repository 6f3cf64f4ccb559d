"""``verl-pivot trace RUN`` and ``verl-pivot report RUN``: make a run's outputs again from its event log.

Plain functions that ``cli.main`` registers as commands. Both also work on a run that was killed or is still going.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from verl_pivot.cli.refusal import refuse

Made = TypeVar("Made")

RunDir = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run, with its event log (*.jsonl) inside.", show_default=False),
]


Which = Annotated[
    int,
    typer.Option("--run", help="1 for the first run that used this folder, 2 for the next; 0 for the newest."),
]


def trace(run_dir: RunDir, which: Which = 0) -> None:
    """Write RUN/trace.json, which https://ui.perfetto.dev opens; that of an earlier run goes to RUN/run_1 and so on."""
    from verl_pivot.observe.events import read_events
    from verl_pivot.observe.perfetto import write_trace
    from verl_pivot.observe.report import outputs_of

    events = _or_explain(lambda: read_events(run_dir, which))
    outputs_of(run_dir, which).mkdir(exist_ok=True)
    path = _or_explain(lambda: write_trace(events, outputs_of(run_dir, which) / "trace.json"))
    typer.echo(f"{path}: open it in https://ui.perfetto.dev")


def report(
    run_dir: RunDir,
    png: Annotated[bool, typer.Option(help="Also draw RUN/timeline.png (needs matplotlib).")] = True,
    which: Which = 0,
) -> None:
    """Write RUN/report.json and RUN/timeline.png (of an earlier run: to RUN/run_1 and so on), and print the summary."""
    import json

    from rich.console import Console

    from verl_pivot.observe.report import render_summary, write_outputs

    paths = _or_explain(lambda: write_outputs(run_dir, png=png, trace=False, run=which))
    Console().print(render_summary(json.loads(paths["report"].read_text(encoding="utf-8"))))
    for path in paths.values():
        typer.echo(path)


def _or_explain(make: Callable[[], Made]) -> Made:
    """``make()``, or exit code 2 with one message when there is no run to read or nothing to draw with."""
    try:
        return make()
    except (FileNotFoundError, ImportError, ValueError) as error:
        refuse(error)
