"""Which verl this package works with. Standard library only."""

from __future__ import annotations

from importlib import metadata

from verl_pivot.config.findings import Finding, error
from verl_pivot.vllm_ext import versions as vllm_versions

VERL = "0.9.1"
"""The one release whose hooks were read and are tested (tests/verl_ext/test_contract_verl.py)."""


def installed_verl() -> str | None:
    """Release of the installed verl, or None."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return None


def verl_findings() -> list[Finding]:
    """Another verl is refused: hooks may have moved, and silently wrong training is worse than none."""
    installed = installed_verl()
    if installed == VERL:
        return []
    what = "verl is not installed" if installed is None else f"verl-pivot is made for verl {VERL} and no other"
    return [error("verl", installed, what, f"pip install verl=={VERL}")]


def vllm_findings() -> list[Finding]:
    """vLLM is installed in a supported release."""
    found = vllm_versions.installed()
    problem = vllm_versions.check_version(found)
    if problem is None:
        return []
    what, _, way_out = problem.partition(": ")
    return [error("vllm", found.version if found else None, what, way_out or "install a supported release")]
