"""verl's own entry point, in child processes: refused before Ray, with the promised text. About ten seconds each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = "+resource_shift@_global_=pivot"
CPU = "+pivot_platform@_global_=cpu"


def main_ppo(directory: Path, *overrides: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu", **environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"hydra.run.dir={directory}"]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ([GROUP, CPU, "+trainer.resource_shift.stalness=1"], ["did you mean trainer.resource_shift.staleness?"]),
        ([GROUP, CPU, "trainer.resource_shift.stalnes=1"], ["did you mean trainer.resource_shift.staleness?"]),
        (["+trainer.resource_shift=true", "trainer.v1.trainer_mode=sync"], ["leave trainer.v1.trainer_mode out"]),
        (["+resource_shift=pivot", CPU], [f"write {GROUP}"]),
    ],
)
def test_refused_before_ray(overrides: list[str], texts: list[str], tmp_path: Path) -> None:
    run = main_ppo(tmp_path, *overrides)
    assert run.returncode == 1
    assert "verl-pivot refuses this configuration" in run.stderr
    for text in texts:
        assert text in run.stderr
    assert "ray init kwargs" not in run.stdout
    assert "Traceback" not in run.stderr


@pytest.mark.contract
def test_group_refuses_when_verl_keeps_the_plugin_out(tmp_path: Path) -> None:
    run = main_ppo(tmp_path, GROUP, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="")
    assert run.returncode != 0
    assert "verl has not loaded the plugin verl_pivot" in run.stderr
    assert "ray init kwargs" not in run.stdout
