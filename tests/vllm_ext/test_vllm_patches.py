"""The run-time patches, and the same changes as files for people who keep a fork."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from verl_pivot.vllm_ext import cpu_patches
from verl_pivot.vllm_ext.versions import installed_version

FILES = sorted((Path(__file__).parents[2] / "patches").glob("vllm-*.patch"))


def _site_packages() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parents[1]


def _needs_pinned_vllm() -> None:
    if installed_version() not in cpu_patches.KEEP_LINEAR_WEIGHT.versions:
        pytest.skip("made for another vLLM")


def test_there_is_a_file_for_every_patch() -> None:
    assert {re.sub(r"vllm-0\.28\.0-", "", file.stem) for file in FILES} == {p.name for p in cpu_patches.PATCHES}


@pytest.mark.contract
@pytest.mark.parametrize("command", [["git", "apply"], ["patch", "-p1", "--fuzz=0", "-i"]], ids=["git", "patch"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_patch_files_apply_to_the_pinned_release(file: Path, command: list[str], tmp_path: Path) -> None:
    _needs_pinned_vllm()
    touched = re.findall(r"^--- a/(\S+)$", file.read_text(), flags=re.MULTILINE)
    assert touched
    for name in touched:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_site_packages() / name, tmp_path / name)
    before = {name: (tmp_path / name).read_text() for name in touched}
    # Outside any repository: git apply skips what it takes for another one's files.
    subprocess.run(
        [*command, str(file)], cwd=tmp_path, check=True, env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": "/"}
    )
    for name in touched:
        after = (tmp_path / name).read_text()
        assert after != before[name]
        compile(after, name, "exec")


@pytest.mark.contract
@pytest.mark.parametrize("patch", cpu_patches.PATCHES, ids=lambda patch: patch.name)
def test_named_lines_are_where_we_say(patch: cpu_patches.UpstreamPatch) -> None:
    """A patch's location must lead a reader to what it is about."""
    _needs_pinned_vllm()
    word = {"keep-linear-weight": "remove_weight", "prepack-experts-again": "is_weight_update"}.get(
        patch.name, "_pad_moe_intermediate"
    )
    for path, lines in re.findall(r"(vllm/\S+?\.py):(\d+(?:,\d+)*)", patch.location):
        source = (_site_packages() / path).read_text().splitlines()
        for line in lines.split(","):
            near = source[int(line) - 2 : int(line) + 3]
            assert any(word in text for text in near), f"{path}:{line}: {near}"


def _linear_module(version_of_target: int = 1) -> ModuleType:
    module = ModuleType("linear")

    def dispatch_cpu_unquantized_gemm(layer: SimpleNamespace, remove_weight: bool) -> None:
        layer.removed = remove_weight

    def renamed(layer: SimpleNamespace, drop: bool) -> None: ...

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm if version_of_target == 1 else renamed
    return module


@pytest.mark.parametrize(("version", "kept"), [("0.28.0", True), ("0.28.1", False), (None, False)])
def test_a_patch_is_applied_to_known_releases_only(
    monkeypatch: pytest.MonkeyPatch, version: str | None, kept: bool
) -> None:
    monkeypatch.setattr(cpu_patches, "installed_version", lambda: version)
    module, layer = _linear_module(), SimpleNamespace()
    cpu_patches._hooks["keep-linear-weight"](module)
    module.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.removed is not kept


def test_a_known_release_that_looks_different_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_patches, "installed_version", lambda: "0.28.0")
    with pytest.raises(RuntimeError, match="keep-linear-weight"):
        cpu_patches._hooks["keep-linear-weight"](_linear_module(version_of_target=2))
