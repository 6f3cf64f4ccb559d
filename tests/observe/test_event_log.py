"""The event log: what is written can be read, by several writers, after crashes and after another run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from verl_pivot.core.snapshot import Role
from verl_pivot.observe.events import EventLog, read_events
from verl_pivot.observe.kinds import EVENT_TYPES, ROLES, Event, missing_fields

START = {"run_id": "r", "slots": [], "config": {}}


def test_kinds_cover_the_roles_and_the_event_union():
    assert tuple(role.value for role in Role) == ROLES
    assert set(EVENT_TYPES.values()) == set(get_args(Event))


def test_writes_one_json_object_per_line_and_marks_the_first(tmp_path):
    with EventLog(tmp_path / "deep" / "events.jsonl") as log:
        log.emit("run_start", **START)
        log.emit("lease", state="held")
        lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run_start", "lease"]
    assert lines[0]["t0_unix_s"] == log.t0_unix_s
    assert "T" in lines[0]["wall_time"]
    assert "wall_time" not in lines[1]
    assert 0 <= lines[0]["t_s"] <= lines[1]["t_s"] < 5


def test_time_does_not_go_back_when_the_wall_clock_does(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "events.jsonl")
    before = log.now_s()
    monkeypatch.setattr("time.time", lambda: log.t0_unix_s - 3600)
    assert before <= log.now_s() < before + 5


def test_a_given_clock_is_used(tmp_path):
    now = [12.5]
    log = EventLog(tmp_path / "events.jsonl", now_s=lambda: now[0])
    log.emit("lease", state="free")
    now[0] = 99.0
    log.emit("lease", state="held")
    assert [e["t_s"] for e in read_events(tmp_path)] == [12.5, 99.0]


@dataclass
class Setting:
    share: float


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (Role.GENRM, "genrm"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([1.0, np.nan]), [1.0, None]),
        (float("nan"), None),
        ({"a": [float("inf")]}, {"a": [None]}),
        ({Role.TRAIN: 1}, {"train": 1}),
        (frozenset({"b", "a"}), ["a", "b"]),
        (Setting(float("nan")), {"share": None}),
        (Path("/a/b"), "/a/b"),
        ("snow ☃ and\nnew line", "snow ☃ and\nnew line"),
    ],
)
def test_values_become_strict_json(tmp_path, value, read):
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("other", value=value)
    (event,) = read_events(tmp_path)
    assert event["value"] == read


def test_files_of_several_processes_are_merged_in_order(tmp_path):
    control_s, trainer_s = [0.0], [0.0]
    control = EventLog(tmp_path / "events.jsonl", t0_unix_s=1e9, now_s=lambda: control_s[0])
    trainer = EventLog(tmp_path / "trainer.jsonl", t0_unix_s=1e9, now_s=lambda: trainer_s[0])
    control.emit("run_start", **START)
    for t_s in range(1, 6):
        trainer_s[0], control_s[0] = t_s, t_s + 0.5
        trainer.emit("span", role="train", name="update_actor", t_start_s=t_s, duration_s=0.1)
        control.emit("lease", state="held")
    times = [e["t_s"] for e in read_events(tmp_path)]
    assert len(times) == 11
    assert times == sorted(times)


def test_a_real_second_process_shares_the_time_base(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("run_start", **START)
    code = (
        "import sys; from verl_pivot.observe.events import EventLog;"
        "EventLog(sys.argv[1], t0_unix_s=float(sys.argv[2])).emit('lease', state='held')"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "trainer.jsonl", repr(log.t0_unix_s)], check=True)
    log.emit("lease", state="free")
    assert [e.get("state") for e in read_events(tmp_path)] == [None, "held", "free"]


def test_threads_do_not_tear_each_others_lines(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    seen = []
    log.subscribe(seen.append)

    def write(writer):
        for number in range(200):
            log.emit("other", writer=writer, number=number, padding="x" * 500)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(tmp_path)
    assert len(events) == 1600
    assert [e["t_s"] for e in seen] == sorted(e["t_s"] for e in seen)
    for writer in range(8):
        assert [e["number"] for e in events if e["writer"] == writer] == list(range(200))


def test_every_cut_of_the_last_line_leaves_the_rest_readable(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("run_start", **START)
        log.emit("lease", state="held")
        log.emit("other", text="häßlich")
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [e["kind"] for e in read_events(tmp_path)] == ["run_start", "lease"]
    assert "cut short" in caplog.text


def test_a_torn_line_does_not_swallow_what_the_next_process_writes(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, t0_unix_s=1e9) as log:
        log.emit("run_start", **START)
    path.write_bytes(path.read_bytes() + b'{"t_s":1.0,"kind":"le')
    with EventLog(path, t0_unix_s=1e9) as log:
        log.emit("lease", state="held")
    assert [e["kind"] for e in read_events(tmp_path)] == ["run_start", "lease"]


@pytest.mark.parametrize("lines", [2, 3])
def test_a_copy_of_a_log_counts_once(tmp_path, caplog, lines):
    with EventLog(tmp_path / "events.jsonl") as log:
        for number in range(3):
            log.emit("note", text=str(number))
    written = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a copy.jsonl").write_text("".join(written[:lines]))
    assert [event["text"] for event in read_events(tmp_path)] == ["0", "1", "2"]
    assert "repeats" in caplog.text


def test_the_newest_run_of_a_directory_is_read_unless_another_is_asked_for(tmp_path):
    for t0, run_id in ((1e9, "old"), (2e9, "new")):
        for name in ("events.jsonl", "trainer.jsonl"):
            with EventLog(tmp_path / name, t0_unix_s=t0, now_s=lambda: 1.0) as log:
                if name == "events.jsonl":
                    log.emit("run_start", **{**START, "run_id": run_id})
                log.emit("other", run=run_id)
    events = read_events(tmp_path)
    assert [e.get("run", e.get("run_id")) for e in events] == ["new", "new", "new"]
    assert [e.get("run", e.get("run_id")) for e in read_events(tmp_path, 1)] == ["old", "old", "old"]
    assert read_events(tmp_path, 2) == events
    for run in (3, -1):
        with pytest.raises(ValueError, match=rf"run is {run}: .* holds 2 run\(s\)"):
            read_events(tmp_path, run)


def test_a_log_with_another_time_base_is_named(tmp_path, caplog):
    with EventLog(tmp_path / "events.jsonl", t0_unix_s=1e9) as log:
        log.emit("run_start", **START)
    with EventLog(tmp_path / "trainer.jsonl", t0_unix_s=1e9 + 7) as log:
        log.emit("lease", state="held")
    assert [e["kind"] for e in read_events(tmp_path)] == ["run_start"]
    assert "trainer.jsonl" in caplog.text
    assert "t0_unix_s" in caplog.text


def test_an_event_without_its_fields_is_left_out_and_named(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("run_start", **START)
        log.emit("shift", slot=3, source="rollout", target="genrm")
    assert [e["kind"] for e in read_events(tmp_path)] == ["run_start"]
    assert "duration_s, outcome, t_start_s" in caplog.text


@pytest.mark.parametrize(
    ("event", "missing"),
    [
        ({"t_s": 0, "kind": "lease", "state": "held"}, []),
        ({"t_s": 0, "kind": "lease"}, ["state"]),
        ({"kind": "lease", "state": "held"}, ["t_s"]),
        ({"t_s": 0, "kind": "of another version"}, []),
        ({"t_s": 0, "kind": "slot_failed", "slot": 1}, []),
        ({}, ["kind", "t_s"]),
    ],
)
def test_missing_fields(event, missing):
    assert missing_fields(event) == missing


def test_misuse_is_told(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="t_s is set by the log"):
        log.emit("lease", state="held", t_s=1.0)
    log.close()
    log.close()
    with pytest.raises(ValueError, match="was closed"):
        log.emit("lease", state="held")
    with pytest.raises(FileNotFoundError, match="no event log"):
        read_events(tmp_path / "nowhere")
