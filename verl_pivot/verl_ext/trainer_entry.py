"""The name ``resource_shift`` in verl's trainer registry, without the cost of the trainer behind it.

verl imports its trainers in many processes that never build one, and in runs that use another mode; those load
nothing of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from verl_pivot.config.completion import MODE

TRAINER_MODULE = "verl_pivot.verl_ext.trainer"


def register_trainer_entry(v1: ModuleType, failures: Mapping[str, str]) -> None:
    """Put a class under our mode that loads the trainer when it is built. Called once ``v1`` has been imported.

    Args:
        v1: the module ``verl.trainer.ppo.v1``.
        failures: part of the plugin -> cause, looked at when a trainer is built.
    """
    if TRAINER_MODULE in sys.modules:
        return  # it was imported directly and registers itself
    registry = v1.trainer_base.TRAINER_REGISTRY

    class ResourceShiftTrainerEntry(v1.PPOTrainer):  # type: ignore[name-defined, misc]
        """Stands in for ``PPOTrainerResourceShift`` until one is built (in verl's TaskRunner actor)."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if failures:
                causes = "; ".join(f"{part}: {cause}" for part, cause in failures.items())
                raise RuntimeError(f"trainer mode {MODE} is not available, the plugin verl_pivot failed: {causes}")
            registry.pop(MODE, None)
            try:
                import_module(TRAINER_MODULE)
                return registry[MODE](*args, **kwargs)
            except BaseException:
                registry.setdefault(MODE, cls)
                raise

    v1.register_trainer(MODE)(ResourceShiftTrainerEntry)
