"""``verl-pivot simulate``: what each deployment would do with two models on a cluster, in virtual time.

Needs the extra ``sim`` and no torch, verl, ray or vllm.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_pivot.cli.refusal import WORKER_DIED, refuse

if TYPE_CHECKING:
    from verl_pivot.sim.result import SimResult
    from verl_pivot.sim.scenario import Scenario


def simulate(
    policy: Annotated[str, typer.Option(help="Name of the policy in the cost file.")] = "Qwen2.5-7B",
    judge: Annotated[str, typer.Option(help="Name of the judge in the cost file.")] = "Qwen3-30B-A3B",
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster; slots, with a file that verl-pivot fit wrote.")] = 128,
    gpu: Annotated[str, typer.Option(help="GPU in the cost file.")] = "H20",
    staleness: Annotated[int, typer.Option(help="Policy versions that rollout may run ahead.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the workload: the same seed gives the same table.")] = 0,
    costs: Annotated[
        Path | None,
        typer.Option(help="Cost file: of models, or of verl-pivot fit; default: published.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps that are measured.")] = 4,
    response_median: Annotated[float, typer.Option(help="Median tokens of a response.")] = 3000.0,
    response_sigma: Annotated[float, typer.Option(help="Tail of responses: deviation of the logarithm.")] = 0.9,
    response_max: Annotated[int, typer.Option(help="Tokens at which a response is cut off.")] = 15360,
    judge_median: Annotated[float, typer.Option(help="Median tokens of a judgement.")] = 2000.0,
    judge_sigma: Annotated[float, typer.Option(help="Tail of judgements.")] = 0.8,
    judge_max: Annotated[int, typer.Option(help="Tokens at which a judgement is cut off.")] = 20480,
    prompts: Annotated[int, typer.Option(help="Prompts of a step.")] = 128,
    responses: Annotated[int, typer.Option(help="Responses to each prompt.")] = 16,
    mini_batch: Annotated[
        int | None, typer.Option(help="Prompts of an update; default: a quarter of a step's.", show_default=False)
    ] = None,
    tries: Annotated[int, typer.Option(help="Splits of the slots to try for each deployment.")] = 6,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all figures here.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write timeline.png and trace.json of resource_shift here.", show_default=False),
    ] = None,
) -> None:
    """Compare deployments on a cluster that you do not have to pay for. All figures are simulated."""
    try:
        import simpy  # noqa: F401
    except ImportError:
        refuse("simulating needs simpy: pip install 'verl-pivot[sim]'")
    from concurrent.futures.process import BrokenProcessPool

    from rich.console import Console

    from verl_pivot.cli.comparison import ours, show
    from verl_pivot.sim.cluster import Cluster
    from verl_pivot.sim.models import CostFile, read_book
    from verl_pivot.sim.scenario import Scenario
    from verl_pivot.sim.simulation import SimulationStuck
    from verl_pivot.sim.workload import LengthSpec, Workload

    for name, value in (("--steps", steps), ("--tries", tries), ("--prompts", prompts), ("--responses", responses)):
        if value < 1:
            refuse(f"{name} is {value}: it must be 1 or more")
    _prepare(json_file, out)
    try:
        workload = Workload(
            LengthSpec(response_median, response_sigma, response_max, correlation=0.5),
            LengthSpec(judge_median, judge_sigma, judge_max, correlation=0.3),
            prompts_per_step=prompts,
            responses_per_prompt=responses,
            mini_batch_prompts=_mini_batch(prompts, mini_batch),
        )
        book = read_book(costs) if costs is not None else None
        if book is not None:
            title = f"as measured in {costs}, {gpus} slots"
            scenario = Scenario.from_book(title, book, gpus, workload, staleness=staleness, seed=seed)
        else:
            cluster = Cluster.of(CostFile.read(costs), policy, judge, gpus, gpu)
            scenario = cluster.scenario(workload, staleness=staleness, seed=seed)
        if scenario.slots < 3:
            raise ValueError(f"gpus is {gpus}: that makes {scenario.slots} slot(s), and three roles need at least 3")
    except ValueError as error:
        refuse(error)
    try:
        results = _compare(scenario, steps, tries)
    except SimulationStuck as error:
        refuse(error)
    except BrokenProcessPool:
        refuse(WORKER_DIED)
    console = Console()
    show(console, scenario, results)
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(scenario, results), indent=1))
        console.print(f"all figures: {json_file}")
    if out is not None:
        for path in _draw(scenario, ours(results), out, steps):
            console.print(str(path))


def _compare(scenario: Scenario, steps: int, tries: int) -> list[SimResult]:
    from rich.progress import Progress

    from verl_pivot.sim.comparison import compare, runs_of
    from verl_pivot.sim.deployments import Deployment

    many = f"{len(Deployment)} deployments, up to {tries} splits each, on {os.cpu_count()} cores"
    typer.echo(f"simulating {many}; 128 GPUs take about a minute on two", err=True)
    with Progress(transient=True) as progress:
        bar = progress.add_task("simulating", total=runs_of(tuple(Deployment)))
        return compare(scenario, steps=steps, tries=tries, on_run=lambda: progress.advance(bar))


def _mini_batch(prompts: int, wanted: int | None) -> int:
    """Raises ValueError unless updates of that size make up a step."""
    size = max(1, prompts // 4) if wanted is None else wanted
    if size < 1 or prompts % size:
        sizes = ", ".join(str(n) for n in range(1, prompts + 1) if prompts % n == 0)
        what = f"--mini-batch is {wanted}" if wanted is not None else f"--prompts {prompts} cannot be cut into four"
        raise ValueError(f"{what}: give --mini-batch one of {sizes}")
    return size


def _prepare(json_file: Path | None, out: Path | None) -> None:
    """Make sure that results can be written, before minutes are spent on them."""
    try:
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            if json_file.is_dir() or not os.access(json_file.parent, os.W_OK):
                raise OSError(f"no file can be written as {json_file}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--json and --out must be a file and a folder that can be written: {error}")


def _as_json(scenario: Scenario, results: list[SimResult]) -> dict[str, Any]:
    return {
        "simulated": True,
        "scenario": scenario.title,
        "staleness": scenario.staleness,
        "seed": scenario.seed,
        "deployments": {str(result.deployment): result.to_json() for result in results},
    }


def _draw(scenario: Scenario, result: SimResult, out: Path, steps: int) -> list[Path]:
    from verl_pivot.observe.perfetto import write_trace
    from verl_pivot.observe.picture import draw_timeline
    from verl_pivot.sim.record import Recorder
    from verl_pivot.sim.result import run

    recorder = Recorder()
    simulation = run(scenario, result.deployment, result.split, steps=steps, on_plan=recorder.on_plan)
    events = recorder.events(simulation)
    return [draw_timeline(events, out / "timeline.png"), write_trace(events, out / "trace.json")]
