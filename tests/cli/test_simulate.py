"""``verl-pivot simulate`` on a small cluster, and without anything of verl."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_pivot.cli.main import app

SMALL = ["--gpus", "8", "--policy", "Qwen2.5-1.5B", "--judge", "GLM-Z1-9B", "--prompts", "16", "--responses", "4"]
SHORT = ["--response-median", "300", "--response-max", "2000", "--judge-median", "200", "--judge-max", "2000"]
FAST = ["--steps", "1", "--tries", "2", "--staleness", "1"]


def test_a_table_figures_and_pictures(tmp_path: Path) -> None:
    wanted = ["--json", str(tmp_path / "all.json"), "--out", str(tmp_path / "pictures")]
    result = CliRunner().invoke(app, ["simulate", *SMALL, *SHORT, *FAST, *wanted], catch_exceptions=False)
    assert result.exit_code == 0, result.output
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
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


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
