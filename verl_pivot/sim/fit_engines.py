"""Costs of decoding and prefill, from the loads that engines reported.

Between two reports of an engine that stays awake, its time goes to steps, each of which gives every running sequence a
token, and to the prompts of requests that have come. Nobody counts those: as many came as the running sequences have
grown, and as many more as have ended, which follows from the tokens made and from the mean length of an answer. Where
running sequences grow, much was prefilled; where they shrink, little: that tells the two costs apart.

Times to the first token do not: they are those of whole batches, hold a step of the engine and the way of the request,
and divided by a short prompt give several times the true cost; judges, asked by HTTP, have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.costs import DecodeCost, fit_decode_cost
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.fit_log import FitError, RunLog, between

Vector = NDArray[np.float64]

LEAST_STRETCHES = 8
AS_GOOD = 3.84
"""Of twice the logarithm of the likelihood: what a figure may cost and still be within its 95 % range."""
_CANDIDATES = 40
_OUTLIER = 0.2
"""Relative error from which a stretch counts linearly instead of squared."""
_LEAST_SHARE = 0.2
"""Of a stretch's time that stays with decoding however dear prefill is."""


@dataclass(frozen=True)
class Stretch:
    """An engine between two of its reports."""

    seconds: float
    running: float
    """Mean of both ends, as ``context_tokens``."""
    context_tokens: float
    made_tokens: float
    grown: float
    """Running sequences at the end less those at the beginning."""


@dataclass(frozen=True)
class EngineCosts:
    """What was found for one role."""

    decode: DecodeCost
    prefill_s_per_token: float
    doubts: tuple[str, ...] = ()


def engine_costs(runs: Sequence[RunLog], role: Role, prompt_tokens: float) -> EngineCosts:
    """The costs of ``role`` over all ``runs``; ``prompt_tokens`` is the mean prompt of one of its requests.

    Raises FitError that says how many reports there were when they are too few.
    """
    found = [stretch for run in runs for stretch in stretches(run, role)]
    if len(found) < LEAST_STRETCHES:
        raise FitError(_too_few(runs, role, len(found)))
    made = sum(stretch.made_tokens for stretch in found)
    requests = sum(run.responses for run in runs)
    answer_tokens = made / requests if requests else math.inf
    columns = np.array([[s.seconds, s.running, s.context_tokens, s.made_tokens, s.grown] for s in found]).T
    seconds, running, context_tokens, made_tokens, grown = columns
    prefilled = prompt_tokens * np.maximum(0.0, grown + made_tokens / answer_tokens)
    return _told_apart(role, seconds, running, context_tokens, made_tokens / running, prefilled)


def stretches(run: RunLog, role: Role) -> Iterator[Stretch]:
    """All between two reports of a slot that had ``role`` meanwhile and always something to run."""
    last: dict[str, tuple[float, dict[str, float]]] = {}
    for event in run.events:
        if event["kind"] == "shift":
            last.pop(str(event["slot"]), None)
        if event["kind"] != "load":
            continue
        for slot, load in event["slots"].items():
            before = last.pop(slot, None)
            if load["role"] != role or load["status"] != "serving" or "context_tokens" not in load:
                continue
            now = {name: float(load[name]) for name in ("running", "context_tokens", "tokens_per_s")}
            last[slot] = (event["t_s"], now)
            if before is None or not before[1]["running"] or not now["running"] or now["tokens_per_s"] <= 0:
                continue
            seconds = event["t_s"] - before[0]
            yield Stretch(
                seconds * run.speed,
                (before[1]["running"] + now["running"]) / 2,
                (before[1]["context_tokens"] + now["context_tokens"]) / 2,
                now["tokens_per_s"] * seconds,
                now["running"] - before[1]["running"],
            )


def _told_apart(
    role: Role, seconds: Vector, running: Vector, context_tokens: Vector, steps: Vector, prefilled: Vector
) -> EngineCosts:
    """The prefill cost with which decoding explains the rest best, and whether others do as well."""
    dearest_s = float(seconds.sum() / prefilled.sum()) if prefilled.sum() else 0.0
    candidates_s = dearest_s * np.linspace(0.0, 1.0, _CANDIDATES) ** 2
    decodes, losses = [], []
    for prefill_s in candidates_s:
        rest_s = np.maximum(seconds - prefill_s * prefilled, _LEAST_SHARE * seconds)
        decode = fit_decode_cost(running, context_tokens, rest_s / steps)
        step_s = np.array([decode.step_latency_s(*at) for at in zip(running, context_tokens, strict=True)])
        errors = ((steps * step_s + prefill_s * prefilled) / seconds - 1) / _OUTLIER
        decodes.append(decode)
        losses.append(float(np.sum(np.sqrt(1 + errors**2) - 1)))
    best = int(np.argmin(losses))
    decode, prefill_s = decodes[best], float(candidates_s[best])
    good = candidates_s[np.array(losses) <= losses[best] * math.exp(AS_GOOD / len(seconds))]
    lowest_s, highest_s = float(good.min()), float(good.max())
    if highest_s - lowest_s <= max(prefill_s, 0.1 * decode.per_seq_s):
        return EngineCosts(decode, prefill_s)
    # A token of a prompt takes no more computing than one sequence more in a step.
    taken_s = min(prefill_s, decode.per_seq_s) if decode.per_seq_s else prefill_s
    doubt = (
        f"roles.{role}.prefill_s_per_token cannot be told from what engines reported: "
        f"{between(lowest_s, highest_s, 'ms a token', 1e3)}; {1e3 * taken_s:.3g} ms is taken"
    )
    return EngineCosts(decode, taken_s, (doubt,))


def _too_few(runs: Sequence[RunLog], role: Role, known: int) -> str:
    loads = [
        load
        for run in runs
        for event in run.of("load")
        for load in event["slots"].values()
        if load["role"] == role and load["status"] == "serving" and load["running"]
    ]
    return (
        f"{role}: {len(loads)} load samples with running sequences, {known} of use; a fit takes {LEAST_STRETCHES} that "
        f"follow on one with running sequences and say how many tokens the sequences hold (logs of version 0.1.0 and "
        f"later do)"
    )
