"""What a check looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_pivot.config.layout import Layout
from verl_pivot.config.lookup import select
from verl_pivot.config.machine import Machine


@dataclass(frozen=True)
class Subject:
    """A completed plain configuration on a machine."""

    config: Mapping[str, Any]
    machine: Machine
    layout: Layout | None = None
    """None where the slots could not be cut; that is reported once, by the check of the slots."""

    def get(self, option: str, default: Any = None) -> Any:
        return select(self.config, option, default)

    @property
    def on_cpu(self) -> bool:
        return bool(self.get("trainer.device") == "cpu")
