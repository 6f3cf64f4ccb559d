"""The checks of a completed configuration, made before Ray starts and by ``verl-pivot doctor``.

Pure: each check looks at a ``Subject`` (plain config, layout, facts about the machine) and returns what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_pivot.config import checks_batch, checks_counts, checks_features, checks_files, checks_machine
from verl_pivot.config.findings import ConfigRefused, Finding
from verl_pivot.config.layout import layout_findings, layout_from_config
from verl_pivot.config.machine import Machine
from verl_pivot.config.subject import Subject


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table."""

    name: str
    run: Callable[[Subject], list[Finding]]
    says: Callable[[Subject], str] = lambda subject: ""
    """What to show when nothing was found."""


def _layout(subject: Subject) -> list[Finding]:
    return layout_findings(subject.config)


def _layout_text(subject: Subject) -> str:
    layout = subject.layout
    if layout is None:
        return ""
    return (
        f"{len(layout.slots)} slot(s) of {layout.gpus_per_slot} GPU(s): {layout.train_slots} train, "
        f"{layout.rollout_slots} rollout, {layout.genrm_slots} genrm"
    )


CHECKS: tuple[Check, ...] = (
    Check("trainer", checks_features.trainer, lambda s: "v1 trainer"),
    Check("slots", _layout, _layout_text),
    Check("nodes", checks_features.one_node, lambda s: "all pools have one node"),
    Check("features", checks_features.unsupported, lambda s: "nothing unsupported is switched on"),
    Check("planner", checks_features.planner, lambda s: str(s.get("trainer.resource_shift.planner.name"))),
    Check("reward model", checks_features.reward_model, lambda s: str(s.get("reward.reward_model.model_path"))),
    Check("reward code", checks_files.reward_code, lambda s: "files that are named are there"),
    Check("data", checks_files.data_files, lambda s: "files that are named are there"),
    Check("engine memory", checks_features.engine_memory, lambda s: "engines and trainer can give their memory back"),
    Check("counts", checks_counts.counts, lambda s: "at least one of each"),
    Check("batch", checks_batch.batch, checks_batch.batch_text),
    Check("micro batches", checks_batch.micro_batches, lambda s: "divide the mini-batch"),
    Check("models", checks_machine.models, checks_machine.models_text),
    Check("parameter store", checks_machine.store, checks_machine.store_text),
    Check("ray", checks_machine.ray_gpus, checks_machine.ray_text),
    Check("platform", checks_machine.platform, lambda s: str(s.get("trainer.device"))),
    Check("proxy", checks_machine.proxy, lambda s: "the judge is reached directly"),
    Check("observe", checks_files.observe, lambda s: str(s.get("trainer.resource_shift.observe.directory"))),
)


def subject_of(config: Mapping[str, Any], machine: Machine) -> Subject:
    """The subject of a completed plain config; its layout is None where the slots cannot be cut."""
    try:
        layout = layout_from_config(config)
    except ConfigRefused:
        layout = None
    return Subject(config, machine, layout)


def run_checks(subject: Subject) -> list[Finding]:
    """Everything that all checks found."""
    return [finding for check in CHECKS for finding in check.run(subject)]
