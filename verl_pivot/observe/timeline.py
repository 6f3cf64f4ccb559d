"""What every slot was at every instant, and how much of that time it worked. Pure: events in, intervals out.

Used on the whole run by the picture, trace and report, and step by step by ``RunningMetrics``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl_pivot.observe.kinds import FAILED, ROLES, SHIFTING, STATES, Event, ShiftEvent


class Interval(NamedTuple):
    """A slot in one state from ``start_s`` up to ``end_s`` (seconds since the start of the run)."""

    start_s: float
    end_s: float
    state: str


Window = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """The run by slot. ``intervals[slot]`` covers ``start_s`` to ``end_s`` without gap or overlap;
    ``busy[slot]`` holds the parts of its role intervals in which the slot worked, see ``build_timeline``."""

    start_s: float
    end_s: float
    intervals: Mapping[int, tuple[Interval, ...]]
    busy: Mapping[int, tuple[Interval, ...]]

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s

    def slot_seconds(self) -> dict[str, float]:
        """Slot-seconds in each state; they add up to ``len(intervals) * wall_s``."""
        return _sum_by_state(self.intervals, STATES)

    def busy_seconds(self) -> dict[str, float]:
        """Slot-seconds of work in each role."""
        return _sum_by_state(self.busy, ROLES)

    def idle_seconds(self) -> dict[str, float]:
        """Slot-seconds that each role held and did not work."""
        held, busy = self.slot_seconds(), self.busy_seconds()
        return {role: max(0.0, held[role] - busy[role]) for role in ROLES}

    def busy_fraction(self) -> dict[str, float | None]:
        """Share of a role's slot-seconds in which it worked; None for a role that never had a slot."""
        held, busy = self.slot_seconds(), self.busy_seconds()
        return {role: min(1.0, busy[role] / held[role]) if held[role] > 0 else None for role in ROLES}

    def final_states(self) -> dict[int, str]:
        return {slot: parts[-1].state for slot, parts in self.intervals.items()}


def build_timeline(
    events: Sequence[Event],
    initial: Mapping[int, str] | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
) -> Timeline:
    """The timeline of ``events`` (sorted by ``t_s``).

    A run without ``run_end`` ends at its last event. ``initial``, ``start_s`` and ``end_s`` are for a window of a run:
    the state of each slot as the window opens, and the window.

    A slot works, in an inference role, while its engines have running sequences: each load sample stands for the time
    nearest to it. In ``train`` it works while the trainer holds the lease and is inside a span (a run without lease
    events holds it throughout). Time without any evidence counts as idle.

    Raises ValueError when there is neither ``run_start`` nor ``initial``.
    """
    begin = next((e for e in events if e["kind"] == "run_start"), None)
    if initial is None:
        if begin is None or begin["kind"] != "run_start":
            raise ValueError("the events have no run_start: the run ended before its control plane began")
        initial = {info["slot"]: str(info["role"]) for info in begin["slots"]}
    if start_s is None:
        start_s = begin["t_s"] if begin is not None else 0.0
    if end_s is None:
        end = next((e["t_s"] for e in reversed(events) if e["kind"] == "run_end"), None)
        end_s = end if end is not None else max((e["t_s"] for e in events), default=start_s)
    end_s = max(start_s, end_s)
    changes = _state_changes(events)
    intervals = {
        slot: tuple(_intervals(state, changes.get(slot, ()), start_s, end_s)) for slot, state in sorted(initial.items())
    }
    return Timeline(start_s, end_s, intervals, _busy(events, intervals))


def shift_counts(events: Iterable[Event]) -> dict[str, int]:
    """Completed shifts by ``"from->to"``."""
    done = (e for e in events if e["kind"] == "shift" and e["outcome"] == "done")
    return dict(Counter(f"{e['source']}->{e['target']}" for e in done))


def slots_by_state(timeline: Timeline) -> list[tuple[float, dict[str, int]]]:
    """How many slots are in each state, at every instant at which that changes."""
    changes: dict[float, dict[str, int]] = {}
    for row in timeline.intervals.values():
        for index, interval in enumerate(row):
            at = changes.setdefault(interval.start_s, {})
            at[interval.state] = at.get(interval.state, 0) + 1
            if index:
                before = row[index - 1].state
                at[before] = at.get(before, 0) - 1
    counts: dict[str, int] = {}
    steps = []
    for t_s in sorted(changes):
        for state, delta in changes[t_s].items():
            counts[state] = counts.get(state, 0) + delta
        steps.append((t_s, dict(counts)))
    return steps


def _sum_by_state(parts: Mapping[int, tuple[Interval, ...]], states: Sequence[str]) -> dict[str, float]:
    sums = dict.fromkeys(states, 0.0)
    for row in parts.values():
        for start_s, end_s, state in row:
            sums[state] += end_s - start_s
    return sums


class _Change(NamedTuple):
    """At ``t_s`` a slot becomes ``state``; ``order`` decides between changes at one instant."""

    t_s: float
    order: int
    state: str


def _state_changes(events: Sequence[Event]) -> dict[int, list[_Change]]:
    changes: dict[int, list[_Change]] = defaultdict(list)
    shifts: dict[int, list[ShiftEvent]] = defaultdict(list)
    for event in events:
        if event["kind"] == "slot_failed":
            changes[event["slot"]].append(_Change(event["t_s"], 1, FAILED))
        elif event["kind"] == "slot_recovered":
            changes[event["slot"]].append(_Change(event["t_s"], 2, str(event["role"])))
        elif event["kind"] == "shift":
            shifts[event["slot"]].append(event)
    last_end_s = {}
    for slot, of_slot in shifts.items():
        of_slot.sort(key=lambda e: e["t_start_s"])
        changes[slot] += _shift_changes(of_slot)
        last_end_s[slot] = of_slot[-1]["t_start_s"] + of_slot[-1]["duration_s"]
    for slot, t_s in _unfinished_shifts(events).items():
        if t_s.last > last_end_s.get(slot, float("-inf")):
            changes[slot].append(_Change(max(t_s.first, last_end_s.get(slot, t_s.first)), 3, SHIFTING))
    for of_any in changes.values():
        of_any.sort()
    return changes


def _shift_changes(shifts: Sequence[ShiftEvent]) -> list[_Change]:
    """Two changes per shift of one slot. A shift's end is cut at the next one's start: durations are measured, and
    rounding must not let an old shift end inside a new one."""
    changes = []
    for shift, following in zip(shifts, (*shifts[1:], None), strict=True):
        start_s = shift["t_start_s"]
        end_s = start_s + max(0.0, shift["duration_s"])
        if following is not None:
            end_s = min(end_s, following["t_start_s"])
        source = str(shift["source"])
        ends = {"done": str(shift["target"]), "rolled_back": source, "cancelled": source}
        after = ends.get(shift["outcome"], FAILED)
        if end_s > start_s:
            changes.append(_Change(start_s, 3, SHIFTING))
        changes.append(_Change(end_s, 0, after))
    return changes


class _Seen(NamedTuple):
    first: float
    last: float


def _unfinished_shifts(events: Sequence[Event]) -> dict[int, _Seen]:
    """Slots that were shifting in the last load sample, and since which sample: a shift is told when it is over, so a
    killed run never told of its last ones."""
    loads = (e for e in reversed(events) if e["kind"] == "load")
    shifting = ((e["t_s"], {int(k) for k, load in e["slots"].items() if load.get("status") == SHIFTING}) for e in loads)
    last_s, still = next(shifting, (0.0, set[int]()))
    open_slots = {slot: _Seen(last_s, last_s) for slot in still}
    for t_s, slots in shifting:
        still &= slots
        if not still:
            break
        open_slots.update({slot: _Seen(t_s, last_s) for slot in still})
    return open_slots


def _intervals(state: str, changes: Iterable[_Change], start_s: float, end_s: float) -> Iterable[Interval]:
    since_s = start_s
    for change in changes:
        t_s = min(max(change.t_s, start_s), end_s)
        if change.state == state:
            continue
        if t_s > since_s:
            yield Interval(since_s, t_s, state)
            since_s = t_s
        state = change.state
    yield Interval(since_s, end_s, state)


def _busy(events: Sequence[Event], intervals: Mapping[int, tuple[Interval, ...]]) -> dict[int, tuple[Interval, ...]]:
    samples: dict[int, tuple[list[float], list[tuple[str, bool]]]] = defaultdict(lambda: ([], []))
    for event in events:
        if event["kind"] == "load":
            for key, load in event["slots"].items():
                if load.get("status", "serving") == "serving":
                    times, values = samples[int(key)]
                    times.append(event["t_s"])
                    values.append((str(load["role"]), load["running"] > 0))
    worked = _trainer_windows(events)
    busy = {}
    for slot, row in intervals.items():
        parts: list[Interval] = []
        for interval in row:
            if interval.end_s <= interval.start_s:
                continue
            if interval.state == "train":
                windows = _clipped(worked, interval.start_s, interval.end_s)
            elif interval.state in ROLES and slot in samples:
                windows = _sampled_windows(interval, *samples[slot])
            else:
                continue
            parts += [Interval(start_s, end_s, interval.state) for start_s, end_s in windows]
        busy[slot] = tuple(parts)
    return busy


def _sampled_windows(interval: Interval, times: Sequence[float], values: Sequence[tuple[str, bool]]) -> list[Window]:
    """Parts of ``interval`` nearer to a sample with running sequences than to one without."""
    low, high = bisect_left(times, interval.start_s), bisect_right(times, interval.end_s)
    inside = [(times[i], values[i][1]) for i in range(low, high) if values[i][0] == interval.state]
    windows: list[Window] = []
    for i, (t_s, is_busy) in enumerate(inside):
        if not is_busy:
            continue
        start_s = (inside[i - 1][0] + t_s) / 2 if i > 0 else interval.start_s
        end_s = (t_s + inside[i + 1][0]) / 2 if i + 1 < len(inside) else interval.end_s
        windows.append((start_s, end_s))
    return _union(windows)


def _trainer_windows(events: Sequence[Event]) -> list[Window]:
    """When the trainer both held the lease and was inside a span."""
    spans = [
        (e["t_start_s"], e["t_start_s"] + max(0.0, e["duration_s"]))
        for e in events
        if e["kind"] == "span" and e["role"] == "train"
    ]
    leases = [(e["t_s"], e["state"]) for e in events if e["kind"] == "lease"]
    if not leases:
        return _union(spans)
    ends = [*(t_s for t_s, _ in leases[1:]), float("inf")]
    held = [(t_s, end_s) for (t_s, state), end_s in zip(leases, ends, strict=True) if state == "held"]
    worked = _union(spans)
    return _union([part for start_s, end_s in held for part in _clipped(worked, start_s, end_s)])


def _clipped(windows: Sequence[Window], start_s: float, end_s: float) -> list[Window]:
    """The parts of sorted disjoint ``windows`` inside ``start_s`` to ``end_s``."""
    first = max(0, bisect_right(windows, (start_s, float("inf"))) - 1)
    parts = []
    for low, high in windows[first:]:
        if low >= end_s:
            break
        if high > start_s:
            parts.append((max(low, start_s), min(high, end_s)))
    return parts


def _union(windows: Iterable[Window]) -> list[Window]:
    """Sorted, disjoint windows of positive length that cover the same time."""
    merged: list[Window] = []
    for start_s, end_s in sorted(windows):
        if end_s <= start_s:
            continue
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged
