from __future__ import annotations

import fcntl
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
    (tmp_path / "data.parquet").touch()
    data = [f"data.{which}_files={tmp_path / 'data.parquet'}" for which in ("train", "val")]
    observed = f"trainer.resource_shift.observe.directory={tmp_path / 'runs'}"
    model = f"actor_rollout_ref.model.path={tmp_path}"
    return [GROUP, CPU, model, *data, observed, "data.train_batch_size=256"]


def output(*arguments: str) -> tuple[int, str]:
    """Exit code and output of ``verl-pivot`` on a terminal of 80 columns."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def words(*arguments: str) -> tuple[int, str]:
    """The same with line breaks taken out."""
    code, text = output(*arguments)
    return code, " ".join(text.split())


def test_good_configuration(good: list[str]) -> None:
    code, text = words("doctor", *good)
    assert code == 0
    for part in ("verl ok 0.9.1", "switch ok on", "slots ok 1 slot(s) of 1 GPU(s): 1 train", "reward model warning"):
        assert part in text


def test_the_cpu_group_without_the_platform_is_one_error(good: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """verl then sets another device, and what follows from that would lead astray."""
    monkeypatch.delenv("VERL_PLATFORM")
    code, text = words("doctor", *good, "data.train_batch_size=10")
    assert code == 1 and text.count("error: ") == 1
    assert "start with VERL_PLATFORM=cpu in front of the same command" in text
    assert text.endswith("Everything else is checked once this is right.")


def test_an_option_that_verl_does_not_have_is_guessed(good: list[str]) -> None:
    code, text = words("doctor", *good, "trainer.n_gpus_per_nod=2")
    assert code == 1 and "did you mean trainer.n_gpus_per_node? A plus would add an option that nobody reads." in text
    code, text = words("doctor", *good, "trainer.quite_something_else=2")
    assert code == 1 and "did you mean" not in text


def test_a_misspelt_switch_says_that_the_rest_is_not_checked(good: list[str]) -> None:
    code, text = words("doctor", *good, "trainer.resource_shift.stalenes=1", "data.train_batch_size=10")
    assert code == 1 and text.endswith("Everything else is checked once this is right.")


def test_errors_are_rows_and_the_exit_code(good: list[str]) -> None:
    code, text = words("doctor", *good, "data.train_batch_size=10", "trainer.resource_shift.planner.name=magic")
    assert code == 1
    for part in ("batch error 1 error, see below", "planner error", "reward model warning 1 warning, see below"):
        assert part in text
    assert text.index("error: data.train_batch_size=10") < text.index("warning: reward.reward_model.enable=False")


def test_findings_are_whole_lines_whatever_the_width(good: list[str]) -> None:
    option = "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module"
    code, text = output("doctor", *good, f"{option}={'some_package.' * 5}engine")
    assert code == 1
    lines = text.splitlines()
    shown = lines.index(f"error: {option}={'some_package.' * 5}engine")
    assert lines[shown + 1].startswith("    follows from trainer.resource_shift and must be verl_pivot.verl_ext.")
    assert lines[shown + 2] == "    -> leave it out; weights go through the parameter store"


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("trainer.resource_shift.stalenes=1", "trainer.resource_shift.staleness"),
        ("trainer.resource_shift.planner.nam=static", "trainer.resource_shift.planner.name"),
        ("trainer.resource_shift.planer.name=static", "trainer.resource_shift.planner"),
        ("trainer.resource_shift.drain_s=1", "trainer.resource_shift.shift.drain_s"),
    ],
)
def test_misspelt_option_without_a_plus_is_not_advised_one(override: str, guess: str, good: list[str]) -> None:
    code, text = words("doctor", *good, override)
    assert code == 1
    assert f"error: {override} there is no such option -> did you mean {guess}?" in text
    assert "To append" not in text


def test_missing_files_are_found_before_a_run(good: list[str]) -> None:
    code, text = words(
        "doctor",
        *good,
        "data.train_files=[/nope/a.parquet,hdfs://there/b.parquet]",
        "reward.custom_reward_function.path=/nope/reward.py",
        "trainer.resource_shift.observe.directory=/proc/x",
    )
    assert code == 1
    for option in (
        "data.train_files=/nope/a.parquet",
        "reward.custom_reward_function.path=/nope/reward.py",
        "trainer.resource_shift.observe.directory=/proc/x",
    ):
        assert f"error: {option}" in text
    assert text.count("error: ") == 3


def test_second_run_in_a_folder_is_found_before_it_starts(good: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, text = words("doctor", *good, "trainer.experiment_name=mine")
    assert code == 1 and text.count("error: ") == 1
    assert f"error: trainer.experiment_name=mine another run is writing to {folder} -> give this one another" in text
    assert words("doctor", *good, "trainer.experiment_name=mine")[0] == 0


def test_sizes_of_nothing_are_findings(good: list[str]) -> None:
    option = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    code, text = words("doctor", *good, f"{option}=0")
    assert (code, f"error: {option}=0" in text) == (1, True)


def test_leftovers_of_another_mode_are_found_in_one_round(good: list[str]) -> None:
    left_over = [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=true",
        "trainer.v1.sampler.max_off_policy_threshold=5",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    ]
    code, text = words("doctor", *good, *left_over)
    assert code == 1
    assert [option for option in left_over if f"error: {option.split('=')[0]}=" not in text] == []


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


@pytest.mark.parametrize("form", ["version", "--version"])
def test_version(form: str) -> None:
    assert words(form) == (0, __version__)
