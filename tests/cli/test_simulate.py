"""``verl-pivot simulate`` on a small cluster, and without anything of verl."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from verl_pivot.cli.comparison import verdict
from verl_pivot.cli.main import app
from verl_pivot.sim.deployments import Deployment, Split
from verl_pivot.sim.ledger import Ledger
from verl_pivot.sim.result import SimResult

SMALL = ["--gpus", "8", "--policy", "Qwen2.5-1.5B", "--judge", "GLM-Z1-9B", "--prompts", "16", "--responses", "4"]
SHORT = ["--response-median", "300", "--response-max", "2000", "--judge-median", "200", "--judge-max", "2000"]
FAST = ["--steps", "1", "--tries", "2", "--staleness", "1"]


def test_a_table_figures_and_pictures(tmp_path: Path) -> None:
    wanted = ["--json", str(tmp_path / "all.json"), "--out", str(tmp_path / "pictures")]
    result = CliRunner().invoke(app, ["simulate", *SMALL, *SHORT, *FAST, *wanted], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.split("\n\nLittle to gain")[0].splitlines())) <= 80, "fits a pipe"
    assert "…" not in result.stdout, "nothing is cut"
    assert "resource_shift_lookahead" in result.stdout and "the best without it; the bound allows" in result.stdout
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["simulated"] is True
    assert set(document["deployments"]) >= {"colocated", "disaggregated", "enable_switch", "resource_shift"}
    for entry in document["deployments"].values():
        assert entry["tokens_per_s"] > 0 and entry["step_s"] > 0 and 0 < entry["bound_fraction"] <= 1.02
    assert (tmp_path / "pictures" / "timeline.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "pictures" / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "GPT-9"], "no costs for GPT-9"),
        (["--gpus", "7", "--policy", "Qwen2.5-32B"], "gpus is 7"),
        (["--gpus", "8", "--policy", "Qwen2.5-32B"], "three roles need"),
        (["--gpu", "B300"], "no hardware named B300"),
        (["--costs", "nowhere.json"], "nowhere.json cannot be read"),
        (["--response-median", "0"], "median_tokens is 0"),
        (["--staleness", "-1"], "staleness is -1"),
        (["--steps", "0"], "--steps is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--prompts", "127"], "--prompts 127 cannot be cut into four: give --mini-batch one of 1, 127"),
        (["--mini-batch", "5"], "--mini-batch is 5: give --mini-batch one of 1, 2, 4,"),
        (["--json", "/"], "no file can be written as /"),
        (["--out", "/dev/null"], "--json and --out must be"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Once they simulate."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        children = psutil.Process(process.pid).children()
        if children and all(child.cpu_times().user > 0.5 for child in children):
            return children
        assert process.poll() is None, "ended before it began"
        time.sleep(0.1)
    raise AssertionError("no workers")


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    """A simulation that takes minutes."""
    command = [sys.executable, "-c", "from verl_pivot.cli.main import app; app()", "simulate", "--tries", "12"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_it_at_once_with_all_workers(long_run: subprocess.Popen[str], times: int) -> None:
    workers = workers_of(long_run)
    for _ in range(times):
        os.killpg(long_run.pid, signal.SIGINT)
        time.sleep(0.3)
    assert long_run.wait(10) != 0
    assert not psutil.wait_procs(workers, timeout=5)[1]


def test_a_worker_that_is_killed_is_said_in_a_line(long_run: subprocess.Popen[str]) -> None:
    workers_of(long_run)[0].kill()
    _, errors = long_run.communicate(timeout=20)
    assert long_run.returncode == 2 and "a process of the simulation was killed" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command(long_run: subprocess.Popen[str], how: signal.Signals) -> None:
    workers = workers_of(long_run)
    os.kill(long_run.pid, how)
    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_needs_nothing_of_verl() -> None:
    """The command's imports, with torch, verl, ray and vllm out of reach."""
    source = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'verl', 'ray', 'vllm', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from typer.testing import CliRunner\n"
        "from verl_pivot.cli.main import app\n"
        f"result = CliRunner().invoke(app, {['simulate', *SMALL, *SHORT, *FAST]!r}, catch_exceptions=False)\n"
        "assert result.exit_code == 0, result.output\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def made(deployment: Deployment, tokens_per_s: float, bound_fraction: float) -> SimResult:
    ledger = Ledger(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    bound_s = 10.0 * bound_fraction
    return SimResult(deployment, Split(2, 1, 1), 2, tokens_per_s, 10.0, (10.0,), bound_s, 0, 0, 0, ledger)


def test_the_sentence_says_what_shifting_comes_to() -> None:
    results = [
        made(Deployment.COLOCATED, 50.0, 0.4),
        made(Deployment.DISAGGREGATED, 80.0, 0.64),
        made(Deployment.HARMONIC, 90.0, 0.72),
        made(Deployment.LOOKAHEAD, 100.0, 0.8),
    ]
    assert verdict(results) == (
        "resource_shift_lookahead (2/1/1) makes 1.25 times the tokens of disaggregated (2/1/1), the best without it; "
        "the bound allows 1.56 times."
    )
    assert verdict([*results[:2], made(Deployment.HARMONIC, 81.0, 0.65)]).startswith("Little to gain here: ")
