"""The node ``trainer.resource_shift`` against its schema: unknown options, wrong types, what is nearest to them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_pivot.config.findings import Finding, error
from verl_pivot.config.schema import ResourceShiftConfig

NODE = "trainer.resource_shift"
RIGHT_FORM = "+resource_shift@_global_=pivot"
_NO_SUCH_OPTION = "there is no such option"
_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}


def typed_node(value: Any) -> tuple[dict[str, Any], list[Finding]]:
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
            yield error(f"{prefix}.{name}", child, _NO_SUCH_OPTION, _closest(prefix, name, known))
        elif is_dataclass(known[name]) and isinstance(child, Mapping):
            yield from _unknown_keys(child, known[name], f"{prefix}.{name}")


def _closest(prefix: str, name: str, known: Mapping[str, Any]) -> str:
    """The best guess: an option of this name elsewhere, a sibling of like name, an option of like name anywhere."""
    last_parts = {option.rsplit(".", 1)[-1]: option for option in valid_keys(ResourceShiftConfig)}
    siblings = difflib.get_close_matches(name, list(known), n=1)
    if siblings and name not in last_parts:
        return f"did you mean {prefix}.{siblings[0]}?"
    anywhere = difflib.get_close_matches(name, list(last_parts), n=1)
    if anywhere:
        return f"did you mean {NODE}.{last_parts[anywhere[0]]}?"
    return f"options here: {', '.join(known)}"


def misspelt_overrides(overrides: Iterable[str]) -> list[Finding]:
    """Overrides without a plus of options that the node does not have.

    Hydra cannot compose these, and advises to add the plus, with which the option would still be unknown.
    """
    known = set(valid_keys(ResourceShiftConfig))
    findings = []
    for override in overrides:
        option, given, value = override.partition("=")
        name = option.removeprefix(f"{NODE}.")
        if given and name != option and name not in known:
            findings.append(error(option, value, _NO_SUCH_OPTION, _closest_to(name)))
    return findings


def _closest_to(name: str) -> str:
    """The best guess for a dotted ``name`` below the node."""
    schema, prefix = ResourceShiftConfig, NODE
    *parents, last = name.split(".")
    for parent in parents:
        below = dict(_children(schema)).get(parent)
        if not is_dataclass(below):
            last = parent
            break
        schema, prefix = below, f"{prefix}.{parent}"  # type: ignore[assignment]
    return _closest(prefix, last, dict(_children(schema)))


def _wrong_types(value: Mapping[Any, Any], schema: type, prefix: str) -> list[Finding]:
    findings = []
    for name, hint in _children(schema):
        if name not in value:
            continue
        option, child = f"{prefix}.{name}", value[name]
        if is_dataclass(hint) and isinstance(child, Mapping):
            findings += _wrong_types(child, hint, option)  # type: ignore[arg-type]
        elif is_dataclass(hint):
            example = f"{option}.{_children(hint)[0][0]}"  # type: ignore[arg-type]
            problem = "is a group of options and takes no value itself"
            findings.append(error(option, child, problem, f"set its options one by one, such as {example}"))
        elif not _fits(schema, name, child):
            wanted, default = _IN_WORDS[hint], _as_typed(getattr(schema(), name))
            way_out = f"set {option} to {wanted}, such as {default} (the default)"
            findings.append(error(option, _as_typed(child), f"must be {wanted}", way_out))
    return findings


def _as_typed(value: Any) -> str:
    """A value as one would write it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fits(schema: type, name: str, value: Any) -> bool:
    if value is None:
        return False
    structured = OmegaConf.structured(schema)
    try:
        OmegaConf.update(structured, name, value)
    except (OmegaConfBaseException, ValueError):
        return False
    typed = structured[name]
    return not isinstance(typed, float) or math.isfinite(typed)
