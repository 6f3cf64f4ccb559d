"""``verl-pivot fit RUN``: a cost file for simulations from the event log of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from verl_pivot.cli.refusal import refuse
from verl_pivot.cli.trace import RunDir, Which


def fit(
    run_dir: RunDir,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: RUN/costs.json.", show_default=False)
    ] = None,
    rollout_prompt_tokens: Annotated[float, typer.Option(help="Mean tokens of a prompt to the policy.")] = 512.0,
    genrm_prompt_tokens: Annotated[float, typer.Option(help="Mean tokens of a prompt to the judge.")] = 2048.0,
    rollout_max_sequences: Annotated[int, typer.Option(help="max_num_seqs of a slot's policy engines.")] = 256,
    genrm_max_sequences: Annotated[int, typer.Option(help="max_num_seqs of a slot's judge engines.")] = 256,
    rollout_kv_tokens: Annotated[int, typer.Option(help="Tokens that a slot's policy engines hold.")] = 1_000_000,
    genrm_kv_tokens: Annotated[int, typer.Option(help="Tokens that a slot's judge engines hold.")] = 1_000_000,
    also: Annotated[
        list[Path] | None,
        typer.Option(help="A further run to fit to, of the same models and settings; may be given again."),
    ] = None,
    which: Which = 0,
) -> None:
    """Fit the costs of decoding, training, shifts and publishing to a run; ``verl-pivot simulate --costs`` reads them.

    The options are settings of the run that its log does not hold. A figure that the run cannot tell is named, with
    what is taken for it: runs with unequal training pools (--also) tell more of training.
    """
    settings = {
        "--rollout-prompt-tokens": rollout_prompt_tokens,
        "--genrm-prompt-tokens": genrm_prompt_tokens,
        "--rollout-max-sequences": rollout_max_sequences,
        "--genrm-max-sequences": genrm_max_sequences,
        "--rollout-kv-tokens": rollout_kv_tokens,
        "--genrm-kv-tokens": genrm_kv_tokens,
    }
    for name, value in settings.items():
        if not (math.isfinite(value) and value > 0):
            refuse(f"{name} is {value}: it must be a number above 0")
    try:
        from verl_pivot.core.cost_book import CostBook
        from verl_pivot.core.snapshot import Role
        from verl_pivot.observe.events import read_events
        from verl_pivot.sim.fit import RunLog, fit_runs

        fitted = fit_runs(
            [RunLog(read_events(run_dir, which)), *(RunLog(read_events(further)) for further in also or ())],
            kv_tokens={Role.ROLLOUT: rollout_kv_tokens, Role.GENRM: genrm_kv_tokens},
            max_sequences={Role.ROLLOUT: rollout_max_sequences, Role.GENRM: genrm_max_sequences},
            prompt_tokens={Role.ROLLOUT: rollout_prompt_tokens, Role.GENRM: genrm_prompt_tokens},
        )
        path = out if out is not None else run_dir / "costs.json"
        book = fitted.book
        content = {**book.to_json(), "doubts": fitted.doubts}
        CostBook.from_json(content)  # what it would refuse is not written
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        refuse(error)
    for role, costs in book.roles.items():
        one_s = costs.decode.step_latency_s(1, {Role.ROLLOUT: rollout_prompt_tokens}.get(role, genrm_prompt_tokens))
        typer.echo(f"{role}: a decode step of one sequence takes {1e3 * one_s:.1f} ms")
    for (source, target), seconds in sorted(book.shift_s.items()):
        typer.echo(f"{source} -> {target}: {seconds:.2f} s")
    for doubt in fitted.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    typer.echo(f"{path}: give it to verl-pivot simulate --costs")
