"""Reading verl's configuration tree as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def to_plain(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Plain dict with interpolations resolved; mandatory values that were not given stay as ``"???"``."""
    if isinstance(config, DictConfig):
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}
    return dict(config)


def select(config: Mapping[str, Any], option: str, default: Any = None) -> Any:
    """Value of a dotted option; ``default`` where it is absent, null or not given (``???``)."""
    node: Any = config
    for key in option.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return default
        node = node[key]
    return default if node is None or node == "???" else node
