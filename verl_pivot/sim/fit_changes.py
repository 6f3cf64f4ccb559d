"""What changes cost in a run: shifts, new weights, and handing a step's work on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.observe.kinds import Event
from verl_pivot.sim.fit_log import RunLog


def shift_s(runs: Sequence[RunLog]) -> dict[tuple[Role, Role], float]:
    """Median seconds of the shifts that were done, by pair."""
    seen: dict[tuple[Role, Role], list[float]] = {}
    for run in runs:
        for event in run.of("shift"):
            if event["outcome"] == "done":
                pair = Role(event["source"]), Role(event["target"])
                seen.setdefault(pair, []).append(event["duration_s"] * run.speed)
    return {pair: median(seconds) for pair, seconds in seen.items()}


def publish_s(runs: Sequence[RunLog]) -> float | None:
    """Median; None without any."""
    seconds = [event["duration_s"] * run.speed for run in runs for event in run.of("publish")]
    return median(seconds) if seconds else None


def reload_s(events: Iterable[Event]) -> float:
    """Median seconds from a publish to an engine's word that it serves it, of engines that were awake; 0 without any.

    Engines that wake for a shift load too, much later: the nearest half a second is what awake ones take.
    """
    published: dict[int, float] = {}
    waits = []
    for event in events:
        if event["kind"] == "publish":
            published[event["version"]] = event["t_s"]
        elif event["kind"] == "served" and event["role"] == Role.ROLLOUT and event["version"] in published:
            waits.append(event["t_s"] - published[event["version"]])
    return median(sorted(waits)[: max(1, len(waits) // 2)])


def feed_s(run: RunLog) -> float | None:
    """Median seconds from a publish until half of a step's responses are asked for; None where the log does not show
    it. In the middle of two load samples, which are as near as the log looks."""
    steps = run.steps
    size = run.responses / len(steps) if steps else 0
    publishes = [event["t_s"] for event in run.of("publish")][1:]  # the first is that of the start
    waits = []
    for published_s, ended_s in pairwise(publishes):
        level = last_s = None
        for at_s, open_now in _open(run, (Role.ROLLOUT,)):
            if at_s <= published_s:
                level = open_now
            elif level is not None and at_s < ended_s:
                if open_now >= level + size / 2:
                    waits.append(((last_s or published_s) + at_s) / 2 - published_s)
                    break
                last_s = at_s
    return median(waits) * run.speed if waits else None


def collect_s(run: RunLog) -> float | None:
    """Median seconds from the last answer of a batch to training's wish for slots, of batches after which nothing was
    left to do; None where there was always more, or where the log does not show it."""
    waits = []
    wanted = [event["t_s"] for event in run.of("lease") if event["state"] == "wanted"]
    samples = list(_open(run, INFERENCE_ROLES))
    for wanted_s in wanted:
        before = [(at_s, open_now) for at_s, open_now in samples if at_s < wanted_s]
        busy = [at_s for at_s, open_now in before if open_now]
        after = next((at_s for at_s, open_now in samples if busy and at_s > busy[-1]), None)
        # The next sample finds nothing open: it all ended between the two.
        if after is not None and not dict(samples)[after]:
            waits.append(wanted_s - (busy[-1] + min(after, wanted_s)) / 2)
    return median(waits) * run.speed if waits else None


def _open(run: RunLog, roles: Sequence[Role]) -> Iterable[tuple[float, int]]:
    """(time, requests that run or wait) of ``roles``, load sample by load sample."""
    for event in run.of("load"):
        loads = [load for load in event["slots"].values() if load["role"] in roles]
        running = sum(load["running"] + load["waiting"] for load in loads)
        yield event["t_s"], running + sum(event["queued"].get(str(role), 0) for role in roles)


def median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
