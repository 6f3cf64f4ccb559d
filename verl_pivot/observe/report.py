"""The report of a run (``report.json``): what happened, what it cost, and what a perfect plan could still win.

Built from the event log alone, so a report can be made again later, and of a run that was killed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_pivot.observe.events import read_events
from verl_pivot.observe.kinds import PHASES, SHIFTING, Event, RunEnd, RunStart, ShiftEvent, StepEvent, reason_class
from verl_pivot.observe.summary import render_summary
from verl_pivot.observe.timeline import Timeline, build_timeline, shift_counts

__all__ = ["build_report", "render_summary", "work_conserving_bound", "write_outputs"]


def build_report(events: Sequence[Event]) -> dict[str, Any]:
    """The report of ``events`` (sorted by ``t_s``) as a JSON-ready dict; a figure that was not measured is None.

    ``wall_s`` runs from ``run_start`` to ``run_end``, or to the last event of a run that never said how it ended (its
    ``outcome`` is ``interrupted``, its ``lost`` None, and its counts are those of the steps it finished).
    ``busy_fraction`` is a role's share of the slot-seconds it held, see ``timeline.build_timeline``. Times in lists are
    seconds since the start of the run. Raises ValueError without ``run_start``.
    """
    timeline = build_timeline(events)
    start = next(e for e in events if e["kind"] == "run_start")
    end = next((e for e in reversed(events) if e["kind"] == "run_end"), None)
    steps = [e for e in events if e["kind"] == "step"]
    return {
        **_run_figures(start, end, steps, timeline),
        **_step_figures(steps),
        **_slot_figures(timeline),
        **_shift_figures(events),
        **_publish_figures(events),
        "failures": _failures(events),
        "no_shift_reasons": _no_shift_reasons(events, timeline.end_s),
        "config": start["config"],
    }


def work_conserving_bound(timeline: Timeline) -> dict[str, float]:
    """A bound on what moving slots could still win.

    ``bound_wall_s``: all busy slot-seconds of all roles, divided by the number of slots. That is the wall time of a
    run that does the same work at the same speed with every slot busy from start to end: free shifts, no idle slot, no
    work that has to wait for other work. No plan can be faster without making the work itself faster (a decode batch
    with fewer sequences is less efficient, so a real plan can lower the busy seconds too).
    ``bound_fraction``: that bound over the wall time, 0 to 1; 1 means nothing is left to win by moving slots.
    """
    bound_s = sum(timeline.busy_seconds().values()) / max(1, len(timeline.intervals))
    return {"bound_wall_s": bound_s, "bound_fraction": bound_s / timeline.wall_s if timeline.wall_s > 0 else 0.0}


def outputs_of(run_dir: str | Path, run: int) -> Path:
    """Where the outputs of a run go: the newest (0) into the folder itself."""
    return Path(run_dir) / f"run_{run}" if run else Path(run_dir)


def write_outputs(run_dir: str | Path, png: bool = True, trace: bool = True, run: int = 0) -> dict[str, Path]:
    """Writes ``report.json``, ``trace.json`` and ``timeline.png`` into ``run_dir`` from its event logs, or those of an
    earlier ``run`` (counted from 1) into its folder ``run_<number>``.

    Returns the paths written by ``report``, ``trace`` and ``timeline``. Called at the end of a run by the trainer, and
    later by ``verl-pivot report`` and ``verl-pivot trace``. The picture comes last: it alone needs matplotlib, and
    without it (ImportError) report and trace are there. Raises FileNotFoundError and ValueError without events.
    """
    events = read_events(run_dir, run)
    directory = outputs_of(run_dir, run)
    directory.mkdir(exist_ok=True)
    paths = {"report": directory / "report.json"}
    paths["report"].write_text(json.dumps(build_report(events), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if trace:
        from verl_pivot.observe.perfetto import write_trace

        paths["trace"] = write_trace(events, directory / "trace.json")
    if png:
        from verl_pivot.observe.picture import draw_timeline

        paths["timeline"] = draw_timeline(events, directory / "timeline.png")
    return paths


def _run_figures(start: RunStart, end: RunEnd | None, steps: Sequence[StepEvent], timeline: Timeline) -> dict[str, Any]:
    counts: Mapping[str, Any] = end or {key: sum(e[key] for e in steps) for key in ("prompts", "responses", "rewards")}
    return {
        "run_id": start["run_id"],
        "started": start.get("wall_time"),
        "outcome": end["outcome"] if end else "interrupted",
        "slots": len(start["slots"]),
        "wall_s": timeline.wall_s,
        "prompts": counts["prompts"],
        "responses": counts["responses"],
        "rewards": counts["rewards"],
        "lost": end["lost"] if end else None,
    }


def _step_figures(steps: Sequence[StepEvent]) -> dict[str, Any]:
    """``*_first`` and ``*_last`` are means over the first and last ``min(3, steps)`` steps."""
    accuracy = [e.get("accuracy") for e in steps]
    agreement = [e.get("judge_agreement") for e in steps]
    walls = [e["wall_s"] for e in steps]
    tokens = sum(e.get("response_tokens") or 0 for e in steps)
    few = min(3, len(steps))
    return {
        "steps": len(steps),
        "step_wall_s": walls,
        "response_tokens": tokens,
        # Over the steps' own time: what comes before the first and after the last step is not throughput.
        "response_tokens_per_s": tokens / sum(walls) if sum(walls) > 0 else None,
        "reward": [e.get("reward_mean") for e in steps],
        "accuracy": accuracy,
        "accuracy_first": _mean(accuracy[:few]),
        "accuracy_last": _mean(accuracy[len(steps) - few :]),
        "judge_agreement": _mean(agreement),
        "judge_agreement_by_step": agreement,
        "probs_diff_max": max((d for e in steps if (d := e.get("probs_diff_max")) is not None), default=None),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _slot_figures(timeline: Timeline) -> dict[str, Any]:
    held = timeline.slot_seconds()
    return {
        "slot_seconds": held,
        "busy_seconds": timeline.busy_seconds(),
        "idle_seconds": timeline.idle_seconds(),
        "busy_fraction": timeline.busy_fraction(),
        "shift_seconds": held[SHIFTING],
        "work_conserving_bound": work_conserving_bound(timeline),
    }


def _shift_figures(events: Sequence[Event]) -> dict[str, Any]:
    shifts = sorted((e for e in events if e["kind"] == "shift"), key=lambda e: e["t_start_s"])
    evened = sum(e["moved"] for e in events if e["kind"] == "evened")
    return {
        "shifts": [_shift_entry(e) for e in shifts],
        "shift_counts": shift_counts(events),
        "shift_outcomes": dict(Counter(e["outcome"] for e in shifts)),
        "sequences_migrated": sum(e.get("aborted") or 0 for e in shifts) + evened,
        "sequences_evened_out": evened,
    }


def _shift_entry(shift: ShiftEvent) -> dict[str, Any]:
    fields: Mapping[str, Any] = shift
    return {
        "t_s": shift["t_start_s"],
        "slot": shift["slot"],
        "from": shift["source"],
        "to": shift["target"],
        "duration_s": shift["duration_s"],
        "reason": shift.get("reason", ""),
        "outcome": shift["outcome"],
        "phases": {phase: fields.get(phase) for phase in PHASES},
        **{key: fields.get(key) for key in ("aborted", "gain", "cost", "error")},
    }


def _publish_figures(events: Sequence[Event]) -> dict[str, Any]:
    published = [e for e in events if e["kind"] == "publish"]
    served = [e["version"] for e in events if e["kind"] == "served" and e["role"] == "rollout"]
    return {
        "versions_published": [e["version"] for e in published],
        "publish_s": _mean([e["duration_s"] for e in published]),
        "publish_bytes": sum(e["bytes"] for e in published),
        "versions_served": sorted(set(served)),
    }


def _failures(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Each failure of a slot, with the time at which it was whole again (None: never)."""
    failures = []
    for event in events:
        if event["kind"] == "slot_failed":
            detail = {"role": event.get("role"), "error": event.get("error", "")}
            failures.append({"t_s": event["t_s"], "slot": event["slot"], **detail, "recovered_s": None})
        elif event["kind"] == "slot_recovered":
            for failure in failures:
                if failure["slot"] == event["slot"] and failure["recovered_s"] is None:
                    failure["recovered_s"] = event["t_s"]
    return failures


def _no_shift_reasons(events: Sequence[Event], end_s: float) -> list[dict[str, Any]]:
    """Why nothing was shifted, the reason that held longest first; one entry for each class of reason.

    A plan is told when its reason changes, so ``seconds`` (until the next one) says more than ``count``.
    """
    plans = [e for e in events if e["kind"] == "plan"]
    ends = [*(e["t_s"] for e in plans[1:]), end_s]
    reasons: dict[str, dict[str, Any]] = {}
    for plan, until_s in zip(plans, ends, strict=False):
        if plan["shifts"]:
            continue
        entry = reasons.setdefault(reason_class(plan["reason"]), {"reason": "", "count": 0, "seconds": 0.0})
        entry["reason"] = plan["reason"]
        entry["count"] += 1
        entry["seconds"] += max(0.0, until_s - plan["t_s"])
    return sorted(reasons.values(), key=lambda entry: -entry["seconds"])
