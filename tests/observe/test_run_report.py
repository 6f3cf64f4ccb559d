"""The report's figures against runs whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.console import Console

from verl_pivot.observe.events import EventLog
from verl_pivot.observe.report import build_report, render_summary, work_conserving_bound, write_outputs
from verl_pivot.observe.timeline import Timeline


def step(number, t_s=0.0, **figures):
    counts = {"step": number, "wall_s": 10.0, "prompts": 4, "responses": 16, "rewards": 16}
    return {"t_s": t_s, "kind": "step", **counts, **figures}


def start():
    slots = [{"slot": i, "role": "rollout", "can_host": ["rollout", "genrm"]} for i in range(2)]
    return {"t_s": 0.0, "kind": "run_start", "run_id": "r", "slots": slots, "config": {"seed": 1}}


def write(run_dir, events):
    """Writes events as a real log does, at their own times."""
    now_s = [0.0]
    with EventLog(run_dir / "events.jsonl", now_s=lambda: now_s[0]) as log:
        for event in events:
            now_s[0] = event["t_s"]
            log.emit(**{key: value for key, value in event.items() if key != "t_s"})
    return run_dir


def summary_text(report):
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_summary(report))
    return console.export_text()


def test_a_whole_run(made_up_run):
    events = made_up_run(4, 3)
    report = build_report(events)
    shifts = [e for e in events if e["kind"] == "shift"]
    assert (report["outcome"], report["steps"], report["slots"], report["lost"]) == ("finished", 3, 4, 0)
    assert report["wall_s"] == events[-1]["t_s"] - events[0]["t_s"]
    assert (report["prompts"], report["responses"], report["rewards"]) == (48, 192, 192)
    assert len(report["shifts"]) == len(shifts)
    assert sum(report["shift_outcomes"].values()) == len(shifts)
    assert sum(report["shift_counts"].values()) == report["shift_outcomes"]["done"] == len(shifts) - 2
    assert report["sequences_migrated"] == sum(e["aborted"] for e in shifts)
    assert report["versions_published"] == [1, 2, 3]
    assert report["versions_served"] == [1, 2, 3]
    assert len(report["step_wall_s"]) == 3
    assert report["response_tokens_per_s"] == pytest.approx(3 * 900 * 16 / sum(report["step_wall_s"]))
    (failure,) = report["failures"]
    assert failure["slot"] == 0 and failure["t_s"] < failure["recovered_s"]
    assert sum(report["slot_seconds"].values()) == pytest.approx(4 * report["wall_s"])
    for role, fraction in report["busy_fraction"].items():
        assert 0 < fraction < 1
        both = report["busy_seconds"][role] + report["idle_seconds"][role]
        assert both == pytest.approx(report["slot_seconds"][role])
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_shift_entries_name_direction_and_phases(made_up_run):
    report = build_report(made_up_run(4, 1))
    entry = report["shifts"][0]
    assert (entry["slot"], entry["from"], entry["to"]) == (0, "rollout", "genrm")
    assert list(entry["phases"]) == ["drain_s", "sleep_s", "load_s", "wake_s"]
    assert sum(entry["phases"].values()) == pytest.approx(entry["duration_s"])
    assert entry["reason"] == "genrm is the bottleneck"
    assert [e["t_s"] for e in report["shifts"]] == sorted(e["t_s"] for e in report["shifts"])


@pytest.mark.parametrize(
    ("accuracy", "first", "last"),
    [
        ([], None, None),
        ([None, None], None, None),
        ([0.5], 0.5, 0.5),
        ([0.2, 0.4], 0.3, 0.3),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 0.2, 0.4),
        ([None, 0.2, None, 0.4, 0.6, 0.8], 0.2, 0.6),
    ],
)
def test_accuracy_is_the_mean_of_the_first_and_last_three_steps(accuracy, first, last):
    report = build_report([start(), *(step(i, accuracy=value) for i, value in enumerate(accuracy))])
    assert report["accuracy_first"] == pytest.approx(first)
    assert report["accuracy_last"] == pytest.approx(last)
    assert report["accuracy"] == accuracy


def test_figures_that_steps_may_lack():
    report = build_report(
        [start(), step(1), step(2, probs_diff_max=0.02, judge_agreement=0.8), step(3, probs_diff_max=0.01)]
    )
    assert report["probs_diff_max"] == 0.02
    assert report["judge_agreement"] == 0.8
    assert report["judge_agreement_by_step"] == [None, 0.8, None]
    assert report["reward"] == [None, None, None]


def test_a_killed_run_is_interrupted_and_counts_its_finished_steps(made_up_run):
    events = made_up_run(4, 3)
    second = next(i for i, e in enumerate(events) if e["kind"] == "step" and e["step"] == 2)
    report = build_report(events[: second + 9])
    assert (report["outcome"], report["lost"], report["steps"]) == ("interrupted", None, 2)
    assert (report["prompts"], report["responses"], report["rewards"]) == (32, 128, 128)
    assert report["wall_s"] == max(e["t_s"] for e in events[: second + 9])
    assert "interrupted" in summary_text(report)


@pytest.mark.parametrize(
    ("busy", "bound_wall_s", "fraction"),
    [
        ({0: [], 1: []}, 0.0, 0.0),
        ({0: [(0, 10, "rollout")], 1: [(0, 5, "genrm"), (8, 10, "train")]}, 8.5, 0.85),
        ({0: [(0, 10, "rollout")], 1: [(0, 10, "rollout")]}, 10.0, 1.0),
    ],
)
def test_work_conserving_bound(busy, bound_wall_s, fraction):
    from verl_pivot.observe.timeline import Interval

    parts = {slot: tuple(Interval(*part) for part in row) for slot, row in busy.items()}
    timeline = Timeline(0.0, 10.0, {0: (), 1: ()}, parts)
    assert work_conserving_bound(timeline) == {"bound_wall_s": bound_wall_s, "bound_fraction": fraction}


def test_reasons_are_grouped_by_what_they_say_and_ranked_by_how_long_they_held():
    plans = [
        (0, "gain 0.12 below margin 0.05", 0),
        (4, "cooldown", 0),
        (5, "genrm starves", 2),
        (9, "gain -3e-2 below margin 0.05", 0),
    ]
    events = [start(), *({"t_s": float(t), "kind": "plan", "reason": r, "shifts": n} for t, r, n in plans)]
    reasons = build_report([*events, step(1, t_s=20.0)])["no_shift_reasons"]
    assert reasons == [
        {"reason": "gain -3e-2 below margin 0.05", "count": 2, "seconds": 15.0},
        {"reason": "cooldown", "count": 1, "seconds": 1.0},
    ]


def test_summary_explains_the_figures(made_up_run):
    report = build_report(made_up_run(4, 3))
    text = summary_text(report)
    for words in (
        "finished",
        "must be 0",
        "No shift, because",
        "rollout -> genrm",
        "1 failed",
        "1 rolled back",
        "bound",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 140


def test_summary_takes_names_as_they_are():
    report = build_report(
        [{**start(), "run_id": "a[bold]b"}, {"t_s": 1.0, "kind": "plan", "reason": "[/red]", "shifts": 0}]
    )
    text = summary_text(report)
    assert "a[bold]b" in text
    assert "[/red]" in text


def test_outputs_are_written_from_the_log(made_up_run, tmp_path):
    pytest.importorskip("matplotlib")
    events = made_up_run(4, 2)
    paths = write_outputs(write(tmp_path, events))
    assert {name: path.name for name, path in paths.items()} == {
        "report": "report.json",
        "trace": "trace.json",
        "timeline": "timeline.png",
    }
    written = json.loads(paths["report"].read_text())
    assert written.pop("started") is not None
    expected = build_report(events)
    assert written["shift_counts"] == expected["shift_counts"]
    assert written["busy_seconds"] == pytest.approx(expected["busy_seconds"], abs=1e-3)
    assert json.loads(paths["trace"].read_text())["traceEvents"]
    assert paths["timeline"].read_bytes().startswith(b"\x89PNG")
    assert set(write_outputs(tmp_path, png=False, trace=False)) == {"report"}


def test_a_log_torn_by_a_kill_still_gives_all_outputs(made_up_run, tmp_path):
    path = write(tmp_path, made_up_run(4, 2)) / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-25])
    report = json.loads(write_outputs(tmp_path, png=False)["report"].read_text())
    assert report["outcome"] == "interrupted"
    assert report["steps"] == 2


def test_without_matplotlib_report_and_trace_are_there_and_the_way_out_is_told(made_up_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="timeline_png=false"):
        write_outputs(write(tmp_path, made_up_run(2, 1)))
    assert (tmp_path / "report.json").exists()
    assert (tmp_path / "trace.json").exists()


def test_importing_observe_is_light():
    code = (
        "import sys; import verl_pivot.observe.report, verl_pivot.observe.metrics, verl_pivot.observe.picture;"
        "heavy = {'torch', 'ray', 'verl', 'vllm', 'matplotlib', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
