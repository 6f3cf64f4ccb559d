"""Costs from a run: what its event log says of decoding, training, shifts and publishing.

Called by ``verl-pivot fit`` and by benchmarks. Needs the log alone, no checkpoint and no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from verl_pivot.core.cost_book import CostBook, RoleCosts, TrainCost
from verl_pivot.core.costs import DecodeCost, DecodeCostFitter
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.observe.kinds import Event

Vector = NDArray[np.float64]

LEAST_STEPS = 3
"""Steps below which nothing is said of training."""


class FitError(ValueError):
    """A run's log does not hold what a fit needs; the message says what is missing."""


def fit_run(
    events: Sequence[Event],
    *,
    kv_tokens: Mapping[Role, int],
    max_sequences: Mapping[Role, int],
    prompt_tokens: Mapping[Role, float],
) -> CostBook:
    """The costs of one slot.

    Args:
        events: a run's events, sorted by time.
        kv_tokens, max_sequences: of one slot, by inference role; they are settings, not measurements.
        prompt_tokens: mean prompt of a request by role, for the share of the time to the first token that each takes.

    Raises FitError when the run is too short, or its log was written without the tokens that sequences hold.
    """
    roles = {
        role: RoleCosts(
            decode_cost(events, role),
            prefill_s_per_token(events, role, prompt_tokens[role]),
            kv_tokens[role],
            max_sequences[role],
        )
        for role in INFERENCE_ROLES
    }
    train = train_cost(events, prompt_tokens[Role.ROLLOUT])
    publishes = [e["duration_s"] for e in events if e["kind"] == "publish"]
    if not publishes or not any(e["kind"] == "shift" and e["outcome"] == "done" for e in events):
        raise FitError("the run published nothing or shifted no slot: fit the costs to one that did both")
    return CostBook(roles, train, shift_s(events), _median(publishes), reload_s(events))


def decode_cost(events: Iterable[Event], role: Role) -> DecodeCost:
    """From the loads that engines of ``role`` reported."""
    fitter = DecodeCostFitter(refit_s=0.0)
    seen = 0
    for event in events:
        if event["kind"] != "load":
            continue
        for load in event["slots"].values():
            if load["role"] != role or load["status"] != "serving" or not load["running"]:
                continue
            seen += 1
            if "context_tokens" in load:
                fitter.add(load["running"], load["context_tokens"], load["tokens_per_s"], event["t_s"])
    fit = fitter.fit()
    if fit is None:
        known = sum(1 for _ in fitter.samples())
        raise FitError(
            f"{role}: {seen} load samples with running sequences, {known} of use; a fit takes 8 that say how many "
            f"tokens the sequences hold (logs of version 0.1.0 and later do)"
        )
    return fit


def prefill_s_per_token(events: Iterable[Event], role: Role, prompt_tokens: float) -> float:
    """From the shortest tenth of the times to the first token: most requests also wait for others. 0 where nothing was
    reported."""
    waits = [
        load["first_token_s"]
        for event in events
        if event["kind"] == "load"
        for load in event["slots"].values()
        if load["role"] == role and load.get("first_token_s", 0.0) > 0
    ]
    return float(np.quantile(waits, 0.1)) / max(1.0, prompt_tokens) if waits else 0.0


def train_cost(events: Sequence[Event], prompt_tokens: float) -> TrainCost:
    """From the trainer's spans: what a step's updates and log-probabilities took, against its tokens.

    A robust fit of ``updates x fixed + tokens x slope``, neither below 0. Steps of equal size tell the two apart badly:
    then most of it is taken to grow with tokens.
    """
    start = next(e for e in events if e["kind"] == "run_start")
    slots = sum(str(Role.TRAIN) in info["can_host"] for info in start["slots"])
    steps = [e for e in events if e["kind"] == "step" and e.get("response_tokens")]
    spans = [e for e in events if e["kind"] == "span" and e["role"] == Role.TRAIN and e["name"] != "publish"]
    seconds, tokens, updates, since_s = [], [], [], 0.0
    for step in steps:
        inside = [span for span in spans if since_s < span["t_s"] <= step["t_s"]]
        since_s = step["t_s"]
        if inside:
            seconds.append(sum(span["duration_s"] for span in inside))
            tokens.append(step["response_tokens"] + step["responses"] * prompt_tokens)
            updates.append(max(1, sum(span["name"].startswith("update") for span in inside)))
    if len(seconds) < LEAST_STEPS:
        raise FitError(f"training: {len(seconds)} steps with spans of the trainer; a fit takes {LEAST_STEPS}")
    fixed_s, slope_s = _line(np.array(tokens), np.array(updates, dtype=np.float64), np.array(seconds))
    return TrainCost(slope_s * max(1, slots), fixed_s)


def _line(tokens: Vector, updates: Vector, seconds: Vector) -> tuple[float, float]:
    """Robust ``seconds = updates x fixed + slope x tokens``, both 0 or more; a slight pull keeps ``fixed`` small where
    the data leave it open."""
    unit = float(tokens.mean())
    scale = float(seconds.mean())

    def misses(x: Vector) -> Vector:
        relative = (x[0] * updates + x[1] * tokens / unit - seconds) / scale
        return np.concatenate([relative, [0.02 * x[0] / scale]])

    found = least_squares(misses, x0=[0.1 * scale, 0.9 * scale], bounds=(0, np.inf), loss="soft_l1", f_scale=0.1)
    return float(found.x[0]), float(found.x[1] / unit)


def shift_s(events: Iterable[Event]) -> dict[tuple[Role, Role], float]:
    """Median seconds of the shifts that were done, by pair."""
    seen: dict[tuple[Role, Role], list[float]] = {}
    for event in events:
        if event["kind"] == "shift" and event["outcome"] == "done":
            seen.setdefault((Role(event["source"]), Role(event["target"])), []).append(event["duration_s"])
    return {pair: _median(seconds) for pair, seconds in seen.items()}


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
    return _median(sorted(waits)[: max(1, len(waits) // 2)])


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
