"""How commands end when they cannot do what was asked."""

from __future__ import annotations

from typing import NoReturn

import typer

WORKER_DIED = (
    "a process of the simulation was killed, or the machine ran out of memory; nothing was written: run it again"
)


def refuse(why: object) -> NoReturn:
    """One line that says why, on standard error, and exit code 2."""
    typer.echo(f"verl-pivot: {why}", err=True)
    raise typer.Exit(2)
