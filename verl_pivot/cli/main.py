"""Entry point of the command ``verl-pivot``. Each command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_pivot import __version__
from verl_pivot.cli.fit import fit
from verl_pivot.cli.plan import plan
from verl_pivot.cli.simulate import simulate
from verl_pivot.cli.trace import report, trace

app = typer.Typer(
    name="verl-pivot",
    help="GPUs that follow the work in RL post-training with verl.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """GPUs that follow the work in RL post-training with verl."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="The hydra overrides you would give to verl.trainer.main_ppo.", show_default=False),
    ] = None,
    config_name: Annotated[str, typer.Option(help="verl's main configuration.")] = "ppo_trainer",
    load: Annotated[bool, typer.Option("--load", help="Also import verl and see the plugin load (seconds).")] = False,
) -> None:
    """Check a training configuration and this machine without starting anything; exit code 1 on errors."""
    from verl_pivot.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(overrides or [], config_name, load))


app.command()(simulate)
app.command()(plan)
app.command()(fit)
app.command()(report)
app.command()(trace)
