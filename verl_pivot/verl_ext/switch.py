"""The check before Ray: completes and examines a configuration inside verl's own ``validate_config``.

``main_ppo`` imports ``verl.utils.config.validate_config`` after the plugin was loaded and calls it with the whole
configuration in the driver, before ``ray.init``. A configuration that does not speak of resource shifting passes
through untouched.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_pivot.config.checks import CHECKS, subject_of
from verl_pivot.config.checks_machine import platform_not_chosen
from verl_pivot.config.completion import Invocation, complete, completed, enabled, is_requested, resource_shift_config
from verl_pivot.config.findings import Finding, error, errors_of, render
from verl_pivot.config.lookup import to_plain
from verl_pivot.config.machine import look_at_machine
from verl_pivot.verl_ext.interrupt import explain_interrupts
from verl_pivot.verl_ext.versions import VERL, verl_findings, vllm_findings
from verl_pivot.vllm_ext.versions import installed_version as installed_vllm

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One line of an examination."""

    check: str
    text: str
    """What to say when nothing was found."""
    findings: tuple[Finding, ...]


def examine(
    config: DictConfig, invocation: Invocation, failures: Mapping[str, str], plugin_text: str = "loaded"
) -> list[Row]:
    """Complete ``config`` in place and run every check; rows stop where the configuration cannot be completed.

    Reads the machine, starts nothing. Called in the driver before Ray and by ``verl-pivot doctor``.
    """
    elsewhere = platform_not_chosen(invocation, os.environ)
    if elsewhere:
        return [*environment_rows(failures, plugin_text), Row("platform", "", tuple(elsewhere))]
    found = complete(config, invocation)
    switch = Row("switch", "on" if enabled(config) else "off", tuple(found))
    if not enabled(config) and not found:
        return [switch]
    rows = [*environment_rows(failures, plugin_text), switch]
    if not completed(config):
        return rows
    plain = to_plain(config)
    subject = subject_of(plain, look_at_machine(plain))
    return rows + [Row(check.name, check.says(subject), tuple(check.run(subject))) for check in CHECKS]


def environment_rows(failures: Mapping[str, str], plugin_text: str = "loaded") -> list[Row]:
    """What does not depend on a configuration: releases and the plugin itself."""
    return [
        Row("verl", VERL, tuple(verl_findings())),
        Row("vllm", str(installed_vllm()), tuple(vllm_findings())),
        Row("plugin", plugin_text, tuple(_failure_findings(failures))),
    ]


def check_before_ray(config: DictConfig, failures: Mapping[str, str], invocation: Invocation | None = None) -> None:
    """Complete ``config`` in place, or leave it alone when it does not ask for resource shifting.

    Raises SystemExit with one message that lists every finding; its exit code is 1. Warnings are logged.
    """
    invocation = invocation if invocation is not None else hydra_invocation()
    if not is_requested(config, invocation):
        return
    findings = [finding for row in examine(config, invocation, failures) for finding in row.findings]
    if errors_of(findings):
        raise SystemExit(render(findings))
    if findings:
        logger.warning(render(findings))
    explain_interrupts(config, resource_shift_config(config))


def hydra_invocation() -> Invocation:
    """Overrides and group choices of the running hydra application; empty outside of one."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return Invocation()
    hydra = HydraConfig.get()
    return Invocation(tuple(hydra.overrides.task), dict(hydra.runtime.choices))


def install(failures: Mapping[str, str]) -> None:
    """Wrap ``verl.utils.config.validate_config``. Called by the plugin inside ``import verl``; idempotent.

    Args:
        failures: the plugin's failed parts, looked at when a configuration is checked.
    """
    import verl.utils.config as verl_config

    original = verl_config.validate_config
    if getattr(original, "wrapped_by_verl_pivot", False):
        return

    @functools.wraps(original)
    def validate_config(config: DictConfig, *args: Any, **kwargs: Any) -> Any:
        check_before_ray(config, failures)
        return original(config, *args, **kwargs)

    validate_config.wrapped_by_verl_pivot = True  # type: ignore[attr-defined]
    verl_config.validate_config = validate_config


def _failure_findings(failures: Mapping[str, str]) -> list[Finding]:
    return [
        error(f"plugin part {part!r}", None, f"failed to load: {cause}", "see the traceback logged above it")
        for part, cause in failures.items()
    ]
