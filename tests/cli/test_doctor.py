from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_pivot import __version__
from verl_pivot.cli import doctor
from verl_pivot.cli.main import app

GROUP = "+resource_shift@_global_=pivot"
CPU = "+pivot_platform@_global_=cpu"


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    return [GROUP, CPU, f"actor_rollout_ref.model.path={tmp_path}", "data.train_batch_size=256"]


def words(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``verl-pivot``, table borders and line breaks taken out."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_good_configuration(good: list[str]) -> None:
    code, text = words("doctor", *good)
    assert code == 0
    for part in ("verl ok 0.9.1", "switch ok on", "slots ok 1 slot(s) of 1 GPU(s): 1 train", "reward model warning"):
        assert part in text


def test_errors_are_rows_and_the_exit_code(good: list[str]) -> None:
    code, text = words("doctor", *good, "data.train_batch_size=10", "trainer.resource_shift.planner.name=magic")
    assert code == 1
    for part in ("batch error data.train_batch_size=10", "planner error", "choose one of harmonic, static"):
        assert part in text


def test_wrong_switch_stops_at_the_switch(good: list[str]) -> None:
    code, text = words("doctor", *good, "+trainer.resource_shift.stalness=1")
    assert code == 1
    assert "did you mean trainer.resource_shift.staleness?" in text
    assert "slots" not in text


def test_wrong_form_is_seen(good: list[str]) -> None:
    code, text = words("doctor", "+resource_shift=pivot", *good[1:])
    assert (code, f"write {GROUP}" in text) == (1, True)


def test_without_overrides_it_looks_at_the_installation() -> None:
    code, text = words("doctor")
    assert code == 0
    assert "verl ok 0.9.1" in text and "plugin ok installed" in text and f"switch ok off; {GROUP} turns it on" in text


def test_overrides_that_do_not_compose() -> None:
    code, text = words("doctor", "trainer.no_such_option=1")
    assert code == 1
    assert "cannot be composed" in text and "no_such_option" in text


def test_plugin_kept_out_by_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    code, text = words("doctor")
    assert code == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=other keeps it out" in text


def test_plugin_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert "not installed as a package" in words("doctor")[1]


def test_it_imports_neither_verl_nor_ray() -> None:
    source = (
        "import sys\n"
        "from verl_pivot.cli.doctor import run_doctor\n"
        f"run_doctor(['{GROUP}'])\n"
        "assert not {'verl', 'ray', 'torch', 'vllm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, timeout=60)


@pytest.mark.contract
def test_load_imports_verl_and_sees_the_plugin() -> None:
    source = "from verl_pivot.cli.doctor import run_doctor\nraise SystemExit(run_doctor([], load=True))\n"
    environ = {**os.environ, "VERL_PLATFORM": "cpu"}
    run = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, timeout=250)
    assert (run.returncode, "loaded whole" in run.stdout) == (0, True), run.stdout + run.stderr


def test_version() -> None:
    assert words("version") == (0, __version__)
