"""``patches/verl-*.patch`` apply to the installed release, change one file each, and leave valid Python."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from verl_pivot.verl_ext import cpu_patches, fsdp_cpu
from verl_pivot.verl_ext.versions import VERL
from verl_pivot.vllm_ext import distribution

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "patches").glob("verl-*.patch"))


def site_packages() -> Path:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def touched(patch: Path) -> str:
    (line,) = [line for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    return line.removeprefix("+++ b/")


def git_apply(patch: Path, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "apply", "--verbose", *options, str(patch)]
    environ = {"GIT_CEILING_DIRECTORIES": str(directory.parent), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=30)


def test_there_is_one_for_each_change_made_at_run_time() -> None:
    changed = {patch.location.partition(":")[0] for patch in cpu_patches.PATCHES}
    for module in (fsdp_cpu, distribution):  # these wrap no function; their docstrings name the file they are about
        changed |= set(re.findall(r"verl/[\w/]+\.py", module.__doc__ or ""))
    assert len(changed) == len(cpu_patches.PATCHES) + 2
    assert sorted(touched(patch) for patch in PATCHES) == sorted(changed)
    assert all(patch.name.startswith(f"verl-{VERL}-") for patch in PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_applies_to_the_installed_release(patch: Path, tmp_path: Path) -> None:
    file = touched(patch)
    copy = tmp_path / file
    copy.parent.mkdir(parents=True)
    shutil.copy(site_packages() / file, copy)
    before = copy.read_text()
    applied = git_apply(patch, tmp_path)
    assert applied.returncode == 0, applied.stderr
    after = copy.read_text()
    assert after != before
    ast.parse(after)
    assert git_apply(patch, tmp_path, "--reverse").returncode == 0
    assert copy.read_text() == before


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_does_not_apply_to_something_else(patch: Path, tmp_path: Path) -> None:
    other = tmp_path / touched(patch)
    other.parent.mkdir(parents=True)
    other.write_text("# another release\n")
    assert git_apply(patch, tmp_path).returncode != 0
