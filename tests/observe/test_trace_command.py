"""``verl-pivot trace`` and ``verl-pivot report`` as commands."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from verl_pivot.cli import trace as commands
from verl_pivot.observe.events import EventLog

app = typer.Typer()
app.command()(commands.trace)
app.command()(commands.report)


@pytest.fixture
def run_dir(made_up_run, tmp_path):
    now_s = [0.0]
    with EventLog(tmp_path / "events.jsonl", now_s=lambda: now_s[0]) as log:
        for event in made_up_run(3, 2):
            now_s[0] = event.pop("t_s")
            log.emit(**event)
    return tmp_path


def test_trace_writes_the_trace_alone(run_dir):
    result = CliRunner().invoke(app, ["trace", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "ui.perfetto.dev" in result.output
    assert json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert not (run_dir / "report.json").exists()


@pytest.mark.parametrize(("options", "drawn"), [([], True), (["--no-png"], False)])
def test_report_prints_the_summary_and_writes_the_files(run_dir, options, drawn):
    if drawn:
        pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["report", str(run_dir), *options])
    assert result.exit_code == 0, result.output
    assert "made-up run" in result.output
    assert json.loads((run_dir / "report.json").read_text())["steps"] == 2
    assert (run_dir / "timeline.png").exists() is drawn


def test_an_earlier_run_is_written_beside_the_newest(run_dir, made_up_run):
    with EventLog(run_dir / "events.jsonl", t0_unix_s=9e9, now_s=lambda: 1.0) as log:
        for event in made_up_run(3, 1):
            log.emit(**{key: value for key, value in event.items() if key != "t_s"})
    for command, made in (("report", "report.json"), ("trace", "trace.json")):
        result = CliRunner().invoke(app, [command, str(run_dir), "--run", "1"])
        assert result.exit_code == 0, result.output
        assert (run_dir / "run_1" / made).exists() and not (run_dir / made).exists()
    assert json.loads((run_dir / "run_1" / "report.json").read_text())["steps"] == 2
    result = CliRunner().invoke(app, ["report", str(run_dir), "--run", "7"])
    assert result.exit_code == 2 and "holds 2 run(s)" in result.output


@pytest.mark.parametrize("command", ["trace", "report"])
def test_a_directory_without_a_run_is_named(tmp_path, command):
    result = CliRunner().invoke(app, [command, str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no event log" in result.output
