"""The cost of training, from what updates took, their tokens, and the slots they ran on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from verl_pivot.core.cost_book import TrainCost
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.fit_log import FitError, RunLog, between

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

LEAST_STEPS = 3
"""Steps below which nothing is said of training."""
AS_GOOD = 3.84
"""As for engines: within this of the best fit, a figure is as good as the best."""
_SHARES = np.linspace(0.0, 1.0, 101)
"""Of the mean step, that fixed costs may be."""


@dataclass(frozen=True)
class TrainSample:
    """What one step's training took, log-probabilities and updates together."""

    seconds: float
    tokens: float
    """Prompts and responses."""
    updates: int
    """Batches that were taken one after another."""
    slots: int


def train_samples(run: RunLog, prompt_tokens: float) -> Iterator[TrainSample]:
    """One for each step whose spans the log has. A batch takes from its first span to the end of its update."""
    spans = [span for span in run.of("span") if span["role"] == Role.TRAIN and span["name"] != "publish"]
    slots, since_s = max(1, run.train_slots()), -math.inf
    for step in run.steps:
        seconds, updates, began_s = 0.0, 0, None
        for span in spans:
            if not since_s < span["t_s"] <= step["t_s"]:
                continue
            began_s = span["t_start_s"] if began_s is None else began_s
            if span["name"].startswith("update"):
                seconds, updates, began_s = seconds + span["t_s"] - began_s, updates + 1, None
        since_s = step["t_s"]
        if updates:
            tokens = step["response_tokens"] + step["responses"] * prompt_tokens
            yield TrainSample(seconds * run.speed, tokens, updates, slots)


def train_cost(samples: Sequence[TrainSample]) -> tuple[TrainCost, tuple[str, ...]]:
    """The cost and, by name, the figures that the samples leave open.

    ``seconds = updates x fixed + tokens x (slot + exchange x (1 - 1 / slots)) / slots``, none below 0, with the least
    fixed cost that fits as well as any. Raises FitError when there are too few.
    """
    if len(samples) < LEAST_STEPS:
        raise FitError(f"training: {len(samples)} steps with spans of the trainer; a fit takes {LEAST_STEPS}")
    seconds = np.array([sample.seconds for sample in samples])
    slots = np.array([sample.slots for sample in samples], dtype=np.float64)
    tokens = np.array([sample.tokens for sample in samples]) / slots
    updates = np.array([sample.updates for sample in samples], dtype=np.float64)
    pools = sorted(set(slots.tolist()))
    columns = [tokens, tokens * (1 - 1 / slots)] if len(pools) > 1 else [tokens]
    doubts = []
    fixed_s = _SHARES * float(seconds.mean()) / float(updates.mean())
    fits = [_fit(np.stack(columns, axis=1), seconds - at * updates, seconds) for at in fixed_s]
    losses = np.array([loss for _, loss in fits])
    good = np.flatnonzero(losses <= losses.min() * math.exp(AS_GOOD / len(seconds)) + 1e-12)
    taken, lowest_s, highest_s = int(good[0]), float(fixed_s[good[0]]), float(fixed_s[good[-1]])
    if highest_s - lowest_s > 0.1 * float(seconds.mean() / updates.mean()):
        doubts.append(
            f"train.fixed_s cannot be told from tokens that differ this little: "
            f"{between(lowest_s, highest_s, 's an update')}; {lowest_s:.3g} s is taken, the rest grows with tokens"
        )
    slot_s, exchange_s = (*fits[taken][0].tolist(), 0.0)[:2]
    if len(pools) == 1:
        doubts.append(
            f"train.exchange_slot_s_per_token cannot be told from training on {pools[0]:g} slots alone: 0 is taken, "
            f"so that other numbers of slots come out as if they shared the work without loss"
        )
    return TrainCost(slot_s, lowest_s, exchange_s), tuple(doubts)


def _fit(design: Matrix, rest_s: Vector, seconds: Vector) -> tuple[Vector, float]:
    """Non-negative coefficients for ``rest_s``, and the sum of relative errors under the soft-L1 loss."""
    weights = np.ones(len(seconds))
    for _ in range(_ITERATIONS):
        by = np.sqrt(weights) / seconds
        scale = np.abs(design).max(axis=0)
        found = nnls(design / scale * by[:, None], np.maximum(rest_s, 0.0) * by)[0] / scale
        errors = (design @ found - rest_s) / seconds / _OUTLIER
        weights = 1 / np.sqrt(1 + errors**2)
    return found, float(np.sum(np.sqrt(1 + errors**2) - 1))


_ITERATIONS = 8
_OUTLIER = 0.1
