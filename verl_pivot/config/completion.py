"""Turns any way of asking for resource shifting into one complete configuration.

``+resource_shift@_global_=pivot``, ``+trainer.resource_shift.enable=true`` and ``+trainer.resource_shift=true`` end in
the same tree: the whole ``trainer.resource_shift`` node with defaults, our trainer mode, the parameter store as verl's
checkpoint engine, and verl's sampler settings derived from the staleness. Pure over an OmegaConf tree, which is
changed in place; knows nothing of verl.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_pivot.config.findings import Finding, error
from verl_pivot.config.schema import ResourceShiftConfig

NODE = "trainer.resource_shift"
MODE = "resource_shift"
MODE_OPTION = "trainer.v1.trainer_mode"
BACKEND = "pivot_store"
BACKEND_MODULE = "verl_pivot.verl_ext.checkpoint_engine"
RIGHT_FORM = "+resource_shift@_global_=pivot"
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
    """Complete ``config`` in place; returns what stands in the way (the tree is then only partly completed)."""
    findings = _form_findings(config, invocation)
    if findings:
        return findings
    node, findings = _typed_node(OmegaConf.select(config, NODE))
    if findings:
        return findings
    findings = _switch_findings(config, node, invocation)
    if findings:
        return findings
    if not node["enable"]:
        return []
    _set(config, NODE, node)
    derived = derived_options(node)
    findings = _conflicts(config, derived, invocation)
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


def _typed_node(value: Any) -> tuple[dict[str, Any], list[Finding]]:
    """The node merged into the schema, as a plain dict with every default; or what is wrong with it."""
    if value is None:
        value = {}
    elif isinstance(value, bool):
        value = {"enable": value}
    elif isinstance(value, DictConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if not isinstance(value, Mapping):
        return {}, [error(NODE, value, "is neither a switch nor a mapping", f"write +{NODE}=true or {RIGHT_FORM}")]
    findings = list(_unknown_keys(value, ResourceShiftConfig, NODE))
    findings += _wrong_types(value, ResourceShiftConfig, NODE)
    if findings:
        return {}, findings
    merged = OmegaConf.merge(OmegaConf.structured(ResourceShiftConfig), value)
    plain = OmegaConf.to_container(merged)
    assert isinstance(plain, dict)
    return {str(key): child for key, child in plain.items()}, []


def valid_keys(schema: type) -> list[str]:
    """Dotted names of all options below ``schema``."""
    names: list[str] = []
    for name, hint in _children(schema):
        names.append(name)
        if is_dataclass(hint):
            names += [f"{name}.{below}" for below in valid_keys(hint)]  # type: ignore[arg-type]
    return names


def _children(schema: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(schema)
    return [(field.name, hints[field.name]) for field in fields(schema)]


def _unknown_keys(value: Mapping[Any, Any], schema: type, prefix: str) -> Iterable[Finding]:
    known = dict(_children(schema))
    for key, child in value.items():
        name = str(key)
        if name not in known:
            yield error(f"{prefix}.{name}", child, "there is no such option", _closest(prefix, name, known))
        elif is_dataclass(known[name]) and isinstance(child, Mapping):
            yield from _unknown_keys(child, known[name], f"{prefix}.{name}")


def _closest(prefix: str, name: str, known: Mapping[str, Any]) -> str:
    """The best guess: a sibling of like name, else an option anywhere whose last part is like it."""
    siblings = difflib.get_close_matches(name, list(known), n=1)
    if siblings:
        return f"did you mean {prefix}.{siblings[0]}?"
    everywhere = valid_keys(ResourceShiftConfig)
    last_parts = {option.rsplit(".", 1)[-1]: option for option in everywhere}
    anywhere = difflib.get_close_matches(name, list(last_parts), n=1)
    if anywhere:
        return f"did you mean {NODE}.{last_parts[anywhere[0]]}?"
    return f"options here: {', '.join(known)}"


def _wrong_types(value: Mapping[Any, Any], schema: type, prefix: str) -> list[Finding]:
    findings = []
    for name, hint in _children(schema):
        if name not in value:
            continue
        child = value[name]
        if is_dataclass(hint) and isinstance(child, Mapping):
            findings += _wrong_types(child, hint, f"{prefix}.{name}")  # type: ignore[arg-type]
        elif is_dataclass(hint) or not _fits(schema, name, child):
            wanted = "a mapping" if is_dataclass(hint) else f"of type {hint.__name__}"
            findings.append(error(f"{prefix}.{name}", child, f"must be {wanted}", "see the option's description"))
    return findings


def _fits(schema: type, name: str, value: Any) -> bool:
    if value is None:
        return False
    try:
        OmegaConf.update(OmegaConf.structured(schema), name, value)
    except (OmegaConfBaseException, ValueError):
        return False
    return True


def _switch_findings(config: DictConfig, node: Mapping[str, Any], invocation: Invocation) -> list[Finding]:
    """The switch and verl's trainer mode must say the same."""
    mode = OmegaConf.select(config, MODE_OPTION)
    if node["enable"]:
        if mode != MODE and (mode != "sync" or invocation.explicit(MODE_OPTION)):
            problem = f"{NODE}.enable=true, but another trainer mode was chosen, in which it would have no effect"
            return [error(MODE_OPTION, mode, problem, f"leave {MODE_OPTION} out, or set {NODE}.enable=false")]
        return []
    if mode == MODE:
        problem = f"this trainer mode needs {NODE}.enable=true"
        way_out = f"leave {NODE}.enable at true; to switch off, remove {RIGHT_FORM} from the command line"
        return [error(MODE_OPTION, mode, problem, way_out)]
    return []


def _conflicts(config: DictConfig, derived: Mapping[str, Any], invocation: Invocation) -> list[Finding]:
    """Options that were given by hand and would be overwritten by what the node implies."""
    findings = []
    for option, wanted in derived.items():
        current = OmegaConf.select(config, option)
        foreign_backend = option.endswith(".backend") and current not in (None, "naive", BACKEND)
        if current != wanted and (foreign_backend or invocation.explicit(option)):
            problem = f"follows from {NODE} and must be {wanted}"
            findings.append(
                error(option, current, problem, f"leave it out; {_SOURCE.get(option, 'it is set for you')}")
            )
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
