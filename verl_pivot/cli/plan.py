"""``verl-pivot plan``: what resource shifting would do for one's own configuration, by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_pivot.cli.refusal import WORKER_DIED, refuse

if TYPE_CHECKING:
    from rich.table import Table

    from verl_pivot.sim.advice import Question
    from verl_pivot.sim.result import SimResult


def plan(
    overrides: Annotated[
        list[str],
        typer.Argument(help="The hydra overrides you would give to verl.trainer.main_ppo.", show_default=False),
    ],
    gpu: Annotated[str, typer.Option(help="GPU in the cost file.")] = "H20",
    policy: Annotated[
        str | None, typer.Option(help="Policy in the cost file; default: by its path.", show_default=False)
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Judge in the cost file; default: by its path.", show_default=False)
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Cost file of models; default: the published figures.", show_default=False)
    ] = None,
    response_median: Annotated[
        float | None,
        typer.Option(help="Median tokens of a response; default: a fifth of the most.", show_default=False),
    ] = None,
    judge_median: Annotated[
        float | None,
        typer.Option(help="Median tokens of a judgement; default: a fifth of the most.", show_default=False),
    ] = None,
    staleness: Annotated[
        list[int] | None, typer.Option(help="Try this one, again for others; default: 0 and 1.")
    ] = None,
    tries: Annotated[int, typer.Option(help="Splits of the slots to try for each deployment.")] = 6,
    seed: Annotated[
        int, typer.Option(help="Seed of the lengths: another one shows how far figures can be trusted.")
    ] = 0,
    config_name: Annotated[str, typer.Option(help="verl's main configuration.")] = "ppo_trainer",
) -> None:
    """Simulate this configuration's models, batch and GPUs: is it worth it, at which staleness, with which split?"""
    from concurrent.futures.process import BrokenProcessPool

    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from rich.console import Console
    from rich.progress import Progress

    from verl_pivot.cli.doctor import compose_verl_config
    from verl_pivot.config.lookup import to_plain

    figures = {"--tries": tries, "--response-median": response_median, "--judge-median": judge_median}
    for name, value in figures.items():
        if value is not None and not value > 0:
            refuse(f"{name} is {value:g}: it must be above 0")
    try:
        from verl_pivot.sim.advice import COMPARED, answer, question_of
        from verl_pivot.sim.comparison import runs_of
        from verl_pivot.sim.models import FITTED_ON, CostFile

        config, _ = compose_verl_config(overrides, config_name)
        question = question_of(
            to_plain(config),
            CostFile.read(costs),
            gpu,
            policy=policy,
            judge=judge,
            response_median=response_median,
            judge_median=judge_median,
        )
        typer.echo("simulating; a cluster of 128 GPUs takes minutes", err=True)
        asked = sorted(set(staleness or (0, 1)))
        with Progress(transient=True) as progress:
            bar = progress.add_task("simulating", total=len(asked) * runs_of(COMPARED) + (0 in asked))
            found = answer(question, asked, tries=tries, steps=3, seed=seed, on_run=lambda: progress.advance(bar))
    except BrokenProcessPool:
        refuse(WORKER_DIED)
    except ModuleNotFoundError as error:
        refuse(f"simulating needs {error.name}: pip install 'verl-pivot[sim]'")
    except (HydraException, OmegaConfBaseException, FileNotFoundError, ValueError, RuntimeError) as error:
        refuse(error)
    console = Console()
    console.print(_table(question, found.results))
    console.print(found.words(), soft_wrap=True)
    if found.is_worth_it:
        console.print("Set it with", " ".join(found.overrides(question.cluster.slot_gpus)), soft_wrap=True)
    if gpu != FITTED_ON and costs is None:
        console.print(
            f"The published decode costs were fitted on {FITTED_ON}; of {gpu} only memory and peak are known."
        )
    console.print("All figures are simulated; docs/simulator.md says from what.", soft_wrap=True)


def _table(question: Question, results: Mapping[int, Sequence[SimResult]]) -> Table:
    from rich.table import Table

    cluster = question.cluster
    table = Table(title=f"{cluster.policy.name} judged by {cluster.judge.name}, {cluster.gpus} x {cluster.gpu.name}")
    for column in ("staleness", "deployment", "train/rollout/genrm", "tokens/s", "step s", "of bound"):
        table.add_column(column, justify="left" if column == "deployment" else "right")
    for staleness, rows in results.items():
        for row in rows:
            numbers = (f"{row.tokens_per_s:,.0f}", f"{row.step_s:.1f}", f"{row.bound_fraction:.2f}")
            table.add_row(str(staleness), str(row.deployment), str(row.split), *numbers)
    return table
