"""What the plugin adds to verl's metrics of a step: flat ``resource_shift/*`` scalars made from the same events."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

from verl_pivot.observe.kinds import FAILED, ROLES, SHIFTING, Event
from verl_pivot.observe.timeline import Timeline, build_timeline, shift_counts

PREFIX = "resource_shift/"


class RunningMetrics:
    """Collects events between two steps: ``log.subscribe(metrics.observe)``, then ``metrics.collect(log.now_s())``.

    Pure apart from what it was told; time comes in. ``observe`` and ``collect`` may be called from different threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._states: dict[int, str] | None = None
        self._start_s = 0.0
        self._policy_version = 0
        self._served: dict[int, int] = {}

    def observe(self, event: Mapping[str, Any]) -> None:
        """Takes one event as ``EventLog`` wrote it."""
        with self._lock:
            self._events.append(cast("Event", _compact(event)))
            if event["kind"] == "run_start":
                self._states = {info["slot"]: str(info["role"]) for info in event["slots"]}
                self._start_s = event["t_s"]
            elif event["kind"] == "publish":
                self._policy_version = event["version"]
            elif event["kind"] == "served" and event["role"] == "rollout":
                self._served[event["slot"]] = event["version"]

    def collect(self, now_s: float) -> dict[str, float]:
        """The scalars of the time since the last call (at first: since ``run_start``), and begins the next stretch.

        ``slots/<role>``             mean number of slots that held the role
        ``busy/<role>``              share of the role's slot-seconds in which it worked; absent if it had none
        ``idle_slot_s/<role>``       slot-seconds the role held and did not work
        ``slots/failed``             mean number of failed slots
        ``shift_seconds``            slot-seconds spent shifting
        ``shifts/<from>_to_<to>``    completed shifts
        ``shifts/rolled_back``, ``shifts/failed``
        ``sequences_migrated``       sequences that moved: their slot left, or had more than others
        ``plan/shifts``              shifts that plans asked for
        ``failures``                 slots that failed
        ``policy_version``           newest published; ``versions_served/min`` and ``/max`` over the slots that were in
                                     rollout, by what each served last; absent if none was

        A shift is told when it is over, so one in flight as a step ends counts in the next. Empty before ``run_start``.
        """
        with self._lock:
            if self._states is None:
                return {}
            taken, self._events = self._events, []
        events = sorted(taken, key=lambda e: e["t_s"])
        timeline = build_timeline(events, self._states, self._start_s, now_s)
        metrics = {**_slot_metrics(timeline), **_shift_metrics(events), "policy_version": self._policy_version}
        with self._lock:
            self._start_s, self._states = timeline.end_s, timeline.final_states()
            # An engine that slept all the time served nobody: its last version is of no interest.
            awake = {s for s, row in timeline.intervals.items() if any(part.state == "rollout" for part in row)}
            served = tuple(version for slot, version in self._served.items() if slot in awake)
            self._events = [*_still_true(events, timeline.end_s), *self._events]
        if served:
            metrics |= {"versions_served/min": min(served), "versions_served/max": max(served)}
        return {PREFIX + name: float(value) for name, value in metrics.items()}


_SAMPLES: dict[tuple[str, str, bool], dict[str, Any]] = {}


def _compact(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """A load sample reduced to what the timeline reads, with equal slots sharing one object: a long step on many slots
    has hundreds of thousands of them."""
    if event["kind"] != "load":
        return event
    slots = {}
    for slot, load in event["slots"].items():
        key = (str(load["role"]), str(load.get("status", "serving")), load["running"] > 0)
        if key not in _SAMPLES:
            _SAMPLES[key] = {"role": key[0], "status": key[1], "running": int(key[2])}
        slots[slot] = _SAMPLES[key]
    return {"t_s": event["t_s"], "kind": "load", "slots": slots, "queued": {}}


def _still_true(events: list[Event], now_s: float) -> list[Event]:
    """What the next stretch must know of this one: the last lease, and the last sample of the slots at work."""
    kept: list[Event] = [*[e for e in events if e["kind"] == "lease"][-1:]]
    load = next((e for e in reversed(events) if e["kind"] == "load"), None)
    if load is not None:
        at_work = {slot: sample for slot, sample in load["slots"].items() if sample.get("status") == "serving"}
        kept.append({"t_s": now_s, "kind": "load", "slots": at_work, "queued": {}})
    return kept


def _slot_metrics(timeline: Timeline) -> dict[str, float]:
    held, idle = timeline.slot_seconds(), timeline.idle_seconds()
    wall_s = max(timeline.wall_s, 1e-9)
    metrics = {f"slots/{state}": held[state] / wall_s for state in (*ROLES, FAILED)}
    metrics |= {f"busy/{role}": share for role, share in timeline.busy_fraction().items() if share is not None}
    metrics |= {f"idle_slot_s/{role}": idle[role] for role in ROLES}
    return {**metrics, "shift_seconds": held[SHIFTING]}


def _shift_metrics(events: list[Event]) -> dict[str, float]:
    shifts = [e for e in events if e["kind"] == "shift"]
    done = shift_counts(events)
    metrics: dict[str, float] = {
        f"shifts/{source}_to_{target}": done.get(f"{source}->{target}", 0)
        for source in ROLES
        for target in ROLES
        if source != target
    }
    metrics |= {f"shifts/{end}": sum(e["outcome"] == end for e in shifts) for end in ("rolled_back", "failed")}
    evened = sum(e["moved"] for e in events if e["kind"] == "evened")
    metrics["sequences_migrated"] = sum(e.get("aborted") or 0 for e in shifts) + evened
    metrics["plan/shifts"] = sum(e["shifts"] for e in events if e["kind"] == "plan")
    metrics["failures"] = sum(e["kind"] == "slot_failed" for e in events)
    return metrics
