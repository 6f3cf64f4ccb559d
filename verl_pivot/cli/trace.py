"""``verl-pivot trace RUN`` and ``verl-pivot report RUN``: make a run's outputs again from its event log.

Plain functions that ``cli.main`` registers as commands. Both also work on a run that was killed or is still going.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

Made = TypeVar("Made")

RunDir = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run, with its event log (*.jsonl) inside.", show_default=False),
]


def trace(run_dir: RunDir) -> None:
    """Write RUN/trace.json, which https://ui.perfetto.dev opens."""
    from verl_pivot.observe.events import read_events
    from verl_pivot.observe.perfetto import write_trace

    path = _or_explain(lambda: write_trace(read_events(run_dir), run_dir / "trace.json"))
    typer.echo(f"{path}: open it in https://ui.perfetto.dev")


def report(
    run_dir: RunDir,
    png: Annotated[bool, typer.Option(help="Also draw RUN/timeline.png (needs matplotlib).")] = True,
) -> None:
    """Write RUN/report.json and RUN/timeline.png, and print the summary."""
    import json

    from rich.console import Console

    from verl_pivot.observe.report import render_summary, write_outputs

    paths = _or_explain(lambda: write_outputs(run_dir, png=png, trace=False))
    Console().print(render_summary(json.loads(paths["report"].read_text(encoding="utf-8"))))
    for path in paths.values():
        typer.echo(path)


def _or_explain(make: Callable[[], Made]) -> Made:
    """``make()``, or exit code 2 with one message when there is no run to read or nothing to draw with."""
    try:
        return make()
    except (FileNotFoundError, ImportError, ValueError) as error:
        typer.echo(f"verl-pivot: {error}", err=True)
        raise typer.Exit(2) from error
