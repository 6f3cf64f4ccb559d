"""The trace keeps to what Perfetto's reader of Chrome-format traces needs."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from verl_pivot.observe.perfetto import build_trace, write_trace

NUMBER = (int, float)


def check_schema(trace):
    """Fields and types by phase; every track that is used has a name; slices of one track nest."""
    assert set(trace) >= {"traceEvents", "displayTimeUnit"}
    named, used, slices = set(), set(), defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] in {"X", "C", "i", "M"}
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            if event["name"] == "thread_name":
                assert track not in named
                named.add(track)
            continue
        assert isinstance(event["ts"], int)
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, NUMBER) for value in event["args"].values())
            continue
        used.add(track)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["s"] in {"g", "p", "t"}
    assert used <= named
    for track, of_track in slices.items():
        open_ends = []
        for start, end in sorted(of_track, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"slices of track {track} cross at {start} us"
            open_ends.append(end)


def slices(trace, name):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == name]


@pytest.mark.parametrize("slots", [2, 5, 32])
def test_a_whole_run_keeps_to_the_schema(made_up_run, slots, tmp_path):
    path = write_trace(made_up_run(slots, 3, seed=slots), tmp_path / "trace.json")
    check_schema(json.loads(path.read_text()))


def test_a_run_killed_anywhere_keeps_to_the_schema(made_up_run):
    events = made_up_run(3, 2)
    for length in range(1, len(events), 7):
        check_schema(build_trace(events[:length]))


def test_slots_shifts_and_their_phases(made_up_run):
    events = made_up_run(4, 3)
    trace = build_trace(events)
    told = [e for e in events if e["kind"] == "shift" and e["source"] == "rollout" and e["target"] == "genrm"]
    drawn = slices(trace, "shift rollout -> genrm")
    assert len(drawn) == len(told)
    assert {e["args"]["outcome"] for e in drawn} == {"done", "failed", "rolled_back"}
    assert all(e["args"]["reason"] == "genrm is the bottleneck" for e in drawn)
    first = min(told, key=lambda e: e["t_start_s"])
    for phase in ("drain", "sleep", "load", "wake"):
        durations = [e["dur"] for e in slices(trace, phase)]
        assert any(abs(d - first[f"{phase}_s"] * 1e6) <= 1 for d in durations)
    instants = {e["name"] for e in trace["traceEvents"] if e["ph"] == "i"}
    assert {"slot failed", "version 1", "no shift", "2 shift(s)"} <= instants
    assert len(slices(trace, "update_actor")) == 3
    assert [e["args"]["step"] for e in slices(trace, "step 2")] == [2]


def test_counters_add_up_by_role(made_up_run):
    events = made_up_run(4, 1)
    load = next(e for e in events if e["kind"] == "load")
    counters = [e for e in build_trace(events)["traceEvents"] if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"running", "waiting", "queued", "tokens/s", "slots"}
    first = next(e for e in counters if e["name"] == "running")
    assert first["args"] == {"rollout": sum(s["running"] for s in load["slots"].values()), "genrm": 0}
    assert all(sum(e["args"].values()) == 4 for e in counters if e["name"] == "slots")


def test_crossing_spans_get_tracks_of_their_own(made_up_run):
    events = made_up_run(2, 1)
    for start_s in (1.0, 2.0, 2.5):
        at = {"t_s": start_s + 2, "t_start_s": start_s, "duration_s": 2.0}
        events.append({"kind": "span", "role": "train", "name": "crossing", **at})
    trace = build_trace(sorted(events, key=lambda e: e["t_s"]))
    check_schema(trace)
    assert len({e["tid"] for e in slices(trace, "crossing")}) == 3
