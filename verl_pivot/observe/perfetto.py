"""The run as a Chrome-format trace, which https://ui.perfetto.dev and chrome://tracing open.

Three groups of tracks: slots (roles, shifts and their phases, failures), run (steps, trainer spans, lease, plans,
publishes) and load (counters). The format wants microseconds; whole ones are used throughout, so that a phase never
sticks out of its shift by a rounding error, which viewers answer with a broken nesting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_pivot.observe.kinds import PHASES, SHIFTING, Event, ShiftEvent, StepEvent
from verl_pivot.observe.load import load_by_role
from verl_pivot.observe.timeline import Interval, Timeline, build_timeline, slots_by_state

TraceEvent = dict[str, Any]

_SLOTS, _RUN, _LOAD = 1, 2, 3
_STEP_TRACK, _LEASE_TRACK, _PLAN_TRACK, _PUBLISH_TRACK, _TRAIN_TRACK = 10, 20, 30, 40, 50


def build_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The trace of ``events`` (sorted by ``t_s``) as a JSON-ready object. Raises ValueError without ``run_start``."""
    timeline = build_timeline(events)
    run_id = next((e["run_id"] for e in events if e["kind"] == "run_start"), "")
    trace = [
        *_slot_tracks(timeline, events),
        *_run_tracks(timeline, events),
        *_load_counters(timeline, events),
    ]
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": {"run_id": run_id}}


def write_trace(events: Sequence[Event], path: str | Path) -> Path:
    """Writes ``build_trace(events)`` to ``path`` and returns it."""
    Path(path).write_text(json.dumps(build_trace(events), allow_nan=False, separators=(",", ":")), encoding="utf-8")
    return Path(path)


def _us(t_s: float) -> int:
    return round(t_s * 1e6)


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float, **args: Any) -> TraceEvent:
    start_us = _us(start_s)
    duration_us = max(0, _us(end_s) - start_us)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_us, "dur": duration_us, "args": args}


def _instant(pid: int, tid: int, name: str, t_s: float, **args: Any) -> TraceEvent:
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": _us(t_s), "args": args}


def _group(pid: int, name: str) -> list[TraceEvent]:
    return [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def _track(pid: int, tid: int, name: str) -> list[TraceEvent]:
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _slot_tracks(timeline: Timeline, events: Sequence[Event]) -> Iterable[TraceEvent]:
    yield from _group(_SLOTS, "slots")
    tid_of = {slot: index + 1 for index, slot in enumerate(timeline.intervals)}
    shifts: dict[int, list[ShiftEvent]] = {slot: [] for slot in timeline.intervals}
    for event in events:
        if event["kind"] == "shift" and event["slot"] in tid_of:
            shifts[event["slot"]].append(event)
        elif event["kind"] == "slot_failed" and event["slot"] in tid_of:
            error = str(event.get("error", ""))
            yield _instant(_SLOTS, tid_of[event["slot"]], "slot failed", event["t_s"], error=error)
    for slot, row in timeline.intervals.items():
        tid = tid_of[slot]
        yield from _track(_SLOTS, tid, f"slot {slot}")
        for interval in row:
            if interval.state == SHIFTING:
                yield from _shift_slices(tid, interval, shifts[slot])
            elif interval.end_s > interval.start_s:
                yield _slice(_SLOTS, tid, interval.state, interval.start_s, interval.end_s)


def _shift_slices(tid: int, interval: Interval, shifts: Sequence[ShiftEvent]) -> Iterable[TraceEvent]:
    """The shift that fills ``interval``, and inside it its phases one after the other."""
    start_s, end_s = interval.start_s, interval.end_s
    begun = (e for e in shifts if e["t_start_s"] < end_s and e["t_start_s"] + e["duration_s"] > start_s)
    shift = next(begun, None)
    if shift is None:
        yield _slice(_SLOTS, tid, "shift (unfinished)", start_s, end_s)
        return
    fields: Mapping[str, Any] = shift
    detail = {key: fields[key] for key in ("outcome", "reason", "gain", "cost", "aborted", "error") if key in fields}
    yield _slice(_SLOTS, tid, f"shift {shift['source']} -> {shift['target']}", start_s, end_s, **detail)
    at_s = shift["t_start_s"]
    for key in PHASES:
        until_s = at_s + float(fields.get(key) or 0.0)
        if until_s > at_s:
            yield _slice(_SLOTS, tid, key.removesuffix("_s"), _within(at_s, interval), _within(until_s, interval))
        at_s = until_s


def _within(t_s: float, interval: Interval) -> float:
    return min(max(t_s, interval.start_s), interval.end_s)


def _run_tracks(timeline: Timeline, events: Sequence[Event]) -> Iterable[TraceEvent]:
    yield from _group(_RUN, "run")
    yield from _nested("steps", [_step_slice(e) for e in events if e["kind"] == "step"])
    yield from _track(_RUN, _LEASE_TRACK, "trainer lease")
    leases = [e for e in events if e["kind"] == "lease"]
    for lease, end_s in zip(leases, [*(e["t_s"] for e in leases[1:]), timeline.end_s], strict=False):
        if lease["state"] != "free":
            yield _slice(_RUN, _LEASE_TRACK, lease["state"], lease["t_s"], end_s)
    yield from _track(_RUN, _PLAN_TRACK, "plans")
    yield from _track(_RUN, _PUBLISH_TRACK, "publishes")
    for event in events:
        if event["kind"] == "plan":
            name = f"{event['shifts']} shift(s)" if event["shifts"] else "no shift"
            yield _instant(_RUN, _PLAN_TRACK, name, event["t_s"], reason=event["reason"], shifts=event["shifts"])
        elif event["kind"] == "publish":
            detail = {"version": event["version"], "duration_s": event["duration_s"], "bytes": event["bytes"]}
            yield _instant(_RUN, _PUBLISH_TRACK, f"version {event['version']}", event["t_s"], **detail)
    spans = [e for e in events if e["kind"] == "span"]
    yield from _nested(
        "trainer",
        [_slice(_RUN, _TRAIN_TRACK, e["name"], e["t_start_s"], e["t_start_s"] + e["duration_s"]) for e in spans],
    )


def _step_slice(step: StepEvent) -> TraceEvent:
    figures: Mapping[str, Any] = step
    detail = {key: value for key, value in figures.items() if key not in ("kind", "t_s")}
    return _slice(_RUN, _STEP_TRACK, f"step {step['step']}", step["t_s"] - step["wall_s"], step["t_s"], **detail)


def _nested(name: str, slices: Sequence[TraceEvent]) -> Iterable[TraceEvent]:
    """Slices of one track must nest. Those that would cross the edge of another go to a further track."""
    lanes: list[list[int]] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        for open_ends in lanes:
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
        lane = next((n for n, open_ends in enumerate(lanes) if not open_ends or end <= open_ends[-1]), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            yield from _track(event["pid"], event["tid"] + lane, f"{name} ({lane + 1})" if lane else name)
        lanes[lane].append(end)
        yield {**event, "tid": event["tid"] + lane}


def _load_counters(timeline: Timeline, events: Sequence[Event]) -> Iterable[TraceEvent]:
    yield from _group(_LOAD, "load")
    for event in events:
        if event["kind"] == "load":
            for name, values in load_by_role(event).items():
                yield {"ph": "C", "pid": _LOAD, "tid": 0, "name": name, "ts": _us(event["t_s"]), "args": values}
    for t_s, counts in slots_by_state(timeline):
        yield {"ph": "C", "pid": _LOAD, "tid": 0, "name": "slots", "ts": _us(t_s), "args": counts}
