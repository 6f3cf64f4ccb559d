"""Turns any way of asking for resource shifting into one complete configuration.

``+resource_shift@_global_=pivot``, ``+trainer.resource_shift.enable=true`` and ``+trainer.resource_shift=true`` end in
the same tree: the whole ``trainer.resource_shift`` node with defaults, our trainer mode, the parameter store as verl's
checkpoint engine, and verl's sampler settings derived from the staleness. Pure over an OmegaConf tree, which is
changed in place; knows nothing of verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_pivot.config.findings import Finding, error
from verl_pivot.config.node import NODE, RIGHT_FORM, typed_node
from verl_pivot.config.schema import ResourceShiftConfig

MODE = "resource_shift"
MODE_OPTION = "trainer.v1.trainer_mode"
BACKEND = "pivot_store"
BACKEND_MODULE = "verl_pivot.verl_ext.checkpoint_engine"
_GROUP = "resource_shift@_global_"
_HOW_TO_SWITCH_OFF = f"remove {RIGHT_FORM} or {NODE}.enable from the command line"
_ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
_SAMPLER = "trainer.v1.sampler"


@dataclass(frozen=True)
class Invocation:
    """What the user typed, as far as hydra can tell: empty for a config that was built by hand."""

    overrides: tuple[str, ...] = ()
    """Task overrides, such as ``trainer.v1.trainer_mode=sync``."""
    choices: Mapping[str, Any] | None = None
    """Config group choices (``HydraConfig.runtime.choices``)."""

    def explicit(self, option: str) -> bool:
        """Whether ``option`` was given on the command line."""
        return any(override.lstrip("+").split("=", 1)[0] == option for override in self.overrides)


def is_requested(config: DictConfig, invocation: Invocation = Invocation()) -> bool:
    """Whether anything in the configuration speaks of resource shifting, rightly or wrongly."""
    return (
        OmegaConf.select(config, NODE) is not None
        or OmegaConf.select(config, MODE_OPTION) == MODE
        or "resource_shift" in config
        or "resource_shift" in (invocation.choices or {})
    )


def complete(config: DictConfig, invocation: Invocation = Invocation()) -> list[Finding]:
    """Complete ``config`` in place; returns what stands in the way.

    Where the node itself is wrong or off, the tree is left as it is; ``completed`` tells.
    """
    findings = _form_findings(config, invocation)
    if findings:
        return findings
    node, findings = typed_node(OmegaConf.select(config, NODE))
    if findings:
        return findings
    findings = _switch_findings(config, node, invocation)
    if not node["enable"]:
        return findings
    _set(config, NODE, node)
    derived = derived_options(node)
    findings += _conflicts(config, derived, invocation)
    findings += _left_over(config, node, invocation)
    for option, value in derived.items():
        _set(config, option, value)
    return findings


def derived_options(node: Mapping[str, Any]) -> dict[str, Any]:
    """verl options that follow from ``trainer.resource_shift``."""
    staleness = node["staleness"]
    return {
        MODE_OPTION: MODE,
        "trainer.v1.resource_shift.parameter_sync_step": node["train"]["mini_batches_per_step"],
        f"{_SAMPLER}.max_off_policy_threshold": staleness + 1 if staleness > 0 else None,
        f"{_SAMPLER}.max_off_policy_strategy": "wait",
        f"{_ENGINE}.backend": BACKEND,
        f"{_ENGINE}.custom_backend_module": BACKEND_MODULE,
    }


def _form_findings(config: DictConfig, invocation: Invocation) -> list[Finding]:
    if "resource_shift" not in config and "resource_shift" not in (invocation.choices or {}):
        return []
    return [
        error(
            "+resource_shift",
            (invocation.choices or {}).get("resource_shift"),
            "this form puts the group at the wrong place, where it would have no effect without the plugin",
            f"write {RIGHT_FORM}",
        )
    ]


def _switch_findings(config: DictConfig, node: Mapping[str, Any], invocation: Invocation) -> list[Finding]:
    """The switch, the config group and verl's trainer mode must say the same."""
    mode = OmegaConf.select(config, MODE_OPTION)
    if node["enable"]:
        if mode != MODE and (mode != "sync" or invocation.explicit(MODE_OPTION)):
            problem = f"{NODE}.enable=true, but another trainer mode was chosen, in which it would have no effect"
            return [error(MODE_OPTION, mode, problem, f"leave {MODE_OPTION} out; to switch off, {_HOW_TO_SWITCH_OFF}")]
        return []
    if _GROUP in (invocation.choices or {}):
        problem = f"{RIGHT_FORM} switches on; off with it, parts of what it sets would stay"
        return [error(f"{NODE}.enable", False, problem, f"to switch off, remove {RIGHT_FORM} from the command line")]
    if mode == MODE:
        problem = f"this trainer mode needs {NODE}.enable=true"
        way_out = f"leave {NODE}.enable at true; to switch on, write {RIGHT_FORM}"
        return [error(MODE_OPTION, mode, problem, f"{way_out}, and to switch off, {_HOW_TO_SWITCH_OFF}")]
    return []


def _conflicts(config: DictConfig, derived: Mapping[str, Any], invocation: Invocation) -> list[Finding]:
    """Options that were given by hand and would be overwritten by what the node implies."""
    findings = []
    for option, wanted in derived.items():
        current = OmegaConf.select(config, option)
        foreign_backend = option.endswith(".backend") and current not in (None, "naive", BACKEND)
        if option == MODE_OPTION or current == wanted:  # a wrong mode is told of with the switch
            continue
        if foreign_backend or invocation.explicit(option):
            problem = f"follows from {NODE} and must be {wanted}"
            findings.append(
                error(option, current, problem, f"leave it out; {_SOURCE.get(option, 'it is set for you')}")
            )
    return findings


def _left_over(config: DictConfig, node: Mapping[str, Any], invocation: Invocation) -> list[Finding]:
    """Options of verl's ``separate_async`` that have no effect here, and a counterpart that says something else."""
    findings = []
    mini_batches, staleness = node["train"]["mini_batches_per_step"], node["staleness"]
    for name, default, counterpart, ours, way_out in (
        ("parameter_sync_step", 4, f"{NODE}.train.mini_batches_per_step", mini_batches, "replace it by {}={}"),
        ("num_warmup_batches", 1, f"{NODE}.staleness", staleness, "leave it out; {} says how far rollout runs ahead"),
    ):
        option = f"trainer.v1.separate_async.{name}"
        value = OmegaConf.select(config, option, default=default)
        if value != ours and (value != default or invocation.explicit(option)):
            problem = f"is an option of another trainer mode and has no effect here, where {counterpart}={ours}"
            findings.append(error(option, value, problem, way_out.format(counterpart, value)))
    return findings


_SOURCE = {
    "trainer.v1.resource_shift.parameter_sync_step": f"{NODE}.train.mini_batches_per_step decides it",
    f"{_SAMPLER}.max_off_policy_threshold": f"{NODE}.staleness decides it",
    f"{_SAMPLER}.max_off_policy_strategy": f"{NODE}.staleness decides it",
    f"{_ENGINE}.backend": "weights go through the parameter store",
    f"{_ENGINE}.custom_backend_module": "weights go through the parameter store",
}


def _set(config: DictConfig, option: str, value: Any) -> None:
    """Set a dotted option of a tree that may be in struct mode, adding keys where they are missing."""
    *parents, last = option.split(".")
    node = config
    for key in parents:
        with open_dict(node):
            if OmegaConf.select(node, key) is None:
                node[key] = {}
            node = node[key]
    with open_dict(node):
        node[last] = value


def completed(config: DictConfig) -> bool:
    """Whether the node of ``config`` is whole and switched on, so that everything else can be checked."""
    node, findings = typed_node(OmegaConf.select(config, NODE))
    return not findings and bool(node["enable"]) and OmegaConf.select(config, MODE_OPTION) == MODE


def enabled(config: DictConfig) -> bool:
    """Whether a completed configuration has the switch on."""
    return bool(OmegaConf.select(config, f"{NODE}.enable", default=False))


def resource_shift_config(config: DictConfig | Mapping[str, Any]) -> ResourceShiftConfig:
    """The typed node of a completed configuration, for the trainer and the control plane."""
    node = config["trainer"]["resource_shift"]
    typed = OmegaConf.merge(OmegaConf.structured(ResourceShiftConfig), node)
    built = OmegaConf.to_object(typed)
    assert isinstance(built, ResourceShiftConfig)
    return built
