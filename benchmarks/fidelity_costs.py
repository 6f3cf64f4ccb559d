"""Costs for ``simulator_fidelity.py``: fitted to event logs of the CPU benchmark's runs, and kept in the repository.

Only runs of resource_shift have such logs. Their seconds are taken at machine speed 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployments import workload as real
from benchmarks.fidelity_measured import Measured
from verl_pivot.core.cost_book import CostBook
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.observe.events import read_events
from verl_pivot.sim.fit import Fitted, RunLog, TrainSample, fit_runs

KV_TOKENS = 80_000
"""128 MiB of fp32 keys and values, 3 layers, 1 KV head of 64."""
PROMPT_TOKENS = 40


@dataclass(frozen=True)
class KeptCosts:
    """What the file of costs holds."""

    together: CostBook
    """Of all runs."""
    others: Mapping[str, CostBook]
    """Of each run by itself, and of all with more of training."""
    doubts: tuple[str, ...]
    """What all runs together could not tell."""

    @classmethod
    def read(cls, path: Path) -> KeptCosts:
        content = json.loads(path.read_text())
        others = {name: CostBook.from_json(book) for name, book in content["others"].items()}
        return cls(CostBook.from_json(content), others, tuple(content["doubts"]))


def refit(runs: Path, measured: Mapping[str, Any], path: Path) -> None:
    """Fit to every run of resource_shift in ``measured`` whose folder is below ``runs``, and write ``path``.

    Raises FileNotFoundError when there is none.
    """
    speeds = {name: entry["machine_speed"] for name, entry in measured["deployments"].items()}
    logs = {
        name: RunLog(read_events(folder), speeds[name])
        for name in sorted(speeds)
        for folder in (runs / name / "observe").glob("*")
        if folder.is_dir()
    }
    if not logs:
        raise FileNotFoundError(f"{runs} has no folder of a run of resource_shift that was measured")
    content = {
        **_content(fit(list(logs.values()))),
        "fitted_to": list(logs),
        "others": {
            **{f"{name} alone": _content(fit([log])) for name, log in logs.items()},
            "all, and verl's training on one slot": _content(fit(list(logs.values()), on_one_slot(measured))),
        },
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def on_one_slot(measured: Mapping[str, Any]) -> list[TrainSample]:
    """What verl's disaggregated deployments with one training slot took, as often as they made a step."""
    work, found = real.Workload(), []
    for name, entry in measured["deployments"].items():
        if entry["kind"] == "disaggregated" and entry["slots"]["train"] == 1:
            prompts = work.prompts_per_step * work.responses_per_prompt * PROMPT_TOKENS
            tokens = entry["response_tokens"] / entry["steps"] + prompts
            seconds = Measured(measured).phases_s(name)["training"]
            found += [TrainSample(seconds, tokens, work.mini_batches_per_step, 1)] * entry["steps"]
    return found


def fit(logs: Sequence[RunLog], more_training: Sequence[TrainSample] = ()) -> Fitted:
    work = real.Workload()
    responses = work.expected_tokens(8)["response_tokens_per_step"] / work.prompts_per_step / work.responses_per_prompt
    return fit_runs(
        logs,
        kv_tokens=dict.fromkeys(INFERENCE_ROLES, KV_TOKENS),
        max_sequences=dict.fromkeys(INFERENCE_ROLES, work.max_num_seqs),
        prompt_tokens={Role.ROLLOUT: float(PROMPT_TOKENS), Role.GENRM: real.JUDGE_TEMPLATE_TOKENS + responses},
        more_training=more_training,
    )


def _content(fitted: Fitted) -> dict[str, Any]:
    return {**fitted.book.to_json(), "doubts": list(fitted.doubts)}
