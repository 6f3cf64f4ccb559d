"""How well remaining lengths are predicted, on workloads whose lengths are known to the benchmark alone.

    python benchmarks/length_prediction.py

Compares ``core.lengths`` with a pooled estimator (the Kaplan-Meier curve of the last 2,048 responses, given the tokens
a sequence has so far, without regard to prompts) by the pinball loss at p50 and p90, and with what there is to win at
most: an estimator that knows the true distribution of every prompt. Writes
``benchmarks/results/length_prediction.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # run as a script, outside any package

from rich.progress import track  # noqa: E402
from scipy.special import ndtr, ndtri  # noqa: E402

from benchmarks.deployments.results import environment  # noqa: E402
from verl_pivot.core.lengths import LengthPredictor  # noqa: E402
from verl_pivot.core.survival import SurvivalCurve  # noqa: E402
from verl_pivot.sim.workload import LengthSpec  # noqa: E402

Vector = NDArray[np.float64]
LEVELS = (0.5, 0.9)
MAX_TOKENS, MEDIAN, GROWTH = 15360, 1500.0, 2.0
STEPS, WARMUP, PROMPTS, RESPONSES, DISTINCT = 24, 4, 64, 16, 512
CHECKS = 24
"""Moments of a step at which everything that runs is predicted, evenly spaced in the logarithm of tokens."""


class Pooled:
    """One curve for everybody."""

    def __init__(self, window: int = 2048) -> None:
        self._window, self._births = window, 0
        self._ended: list[tuple[int, float, bool]] = []
        self._running: dict[Any, tuple[int, int]] = {}
        self._curve: SurvivalCurve | None = None

    def start(self, key: Any) -> None:
        self._births += 1
        self._running[key] = (self._births, 0)

    def progress(self, tokens: dict[Any, int]) -> None:
        for key, count in tokens.items():
            self._running[key] = (self._running[key][0], count)

    def finish(self, key: Any, tokens: int) -> None:
        birth, _ = self._running.pop(key)
        self._ended.append((birth, float(np.log(tokens)), tokens >= MAX_TOKENS))
        if self._births % 64 == 0 or len(self._ended) % 64 == 0:
            self._fit()

    def _fit(self) -> None:
        oldest = self._births - self._window
        self._ended = [entry for entry in self._ended if entry[0] > oldest]
        reached = [np.log(count) for birth, count in self._running.values() if birth > oldest and count > 1]
        cut = [length for _, length, is_cut in self._ended if is_cut]
        self._curve = SurvivalCurve.fit(np.array([y for _, y, c in self._ended if not c]), np.array([*cut, *reached]))

    def remaining(self, keys: list[Any]) -> Vector:
        assert self._curve is not None
        tokens = np.array([self._running[key][1] for key in keys], dtype=np.float64)
        reached = np.maximum(np.log(np.maximum(tokens, 1)), self._curve.knots[0])
        totals = np.exp(np.minimum(self._curve.quantiles_beyond(reached, np.array(LEVELS)), 20.0))
        return np.clip(totals - tokens[:, None], 1, MAX_TOKENS - tokens[:, None])


def oracle(spec: LengthSpec, effects: Vector, progress: float, tokens: float) -> Vector:
    """Quantiles [n, levels] of what is left, for one who knows prompt, level and shape."""
    mean = np.log(spec.median_tokens) + progress * np.log(spec.growth)
    mean = mean + spec.sigma * np.sqrt(spec.correlation) * effects
    deviation = spec.sigma * np.sqrt(1 - spec.correlation)
    beyond = ndtr(-(np.log(tokens) - mean) / deviation)
    z = -ndtri(beyond[:, None] * (1 - np.array(LEVELS)))
    totals = np.exp(mean[:, None] + deviation * z)
    return np.asarray(np.clip(totals - tokens, 1, MAX_TOKENS - tokens))


def pinball(true: Vector, quantiles: Vector) -> Vector:
    """Loss [n, levels]."""
    miss = true[:, None] - quantiles
    return np.maximum(np.array(LEVELS) * miss, (np.array(LEVELS) - 1) * miss)


def play(correlation: float, sigma: float, seed: int) -> dict[str, Any]:
    """One workload: mean losses and coverage over all predictions after warm-up."""
    rng = np.random.default_rng(seed)
    spec = LengthSpec(MEDIAN, sigma, MAX_TOKENS, correlation, GROWTH)
    effects = rng.standard_normal(DISTINCT)
    predictor, pooled = LengthPredictor(MAX_TOKENS), Pooled()
    losses: list[Vector] = []
    for step in range(STEPS):
        prompts = (np.arange(PROMPTS) + step * PROMPTS) % DISTINCT
        drawn = spec.draw(rng, effects[prompts], RESPONSES, step / STEPS)
        lengths = {(step, p, j): int(drawn[p, j]) for p in range(PROMPTS) for j in range(RESPONSES)}
        for key in lengths:
            predictor.start(key, key[:2], int(prompts[key[1]]), RESPONSES)
            pooled.start(key)
        alive = sorted(lengths, key=lengths.__getitem__)
        for check in np.unique(np.geomspace(20, max(lengths.values()), CHECKS, endpoint=False).astype(int)):
            while alive and lengths[alive[0]] <= check:
                key = alive.pop(0)
                predictor.finish(key, lengths[key])
                pooled.finish(key, lengths[key])
            tokens = dict.fromkeys(alive, int(check))
            predictor.progress(tokens)
            pooled.progress(tokens)
            if step >= WARMUP and alive:
                true = np.array([lengths[key] - check for key in alive], dtype=np.float64)
                ours = predictor.remaining(alive, LEVELS)
                known = oracle(spec, effects[prompts[[key[1] for key in alive]]], step / STEPS, float(check))
                parts = [pinball(true, q) for q in (ours, pooled.remaining(alive), known)]
                losses.append(np.hstack([*parts, true[:, None] <= ours]))
        for key in alive:
            predictor.finish(key, lengths[key])
            pooled.finish(key, lengths[key])
    mean = np.concatenate(losses).mean(axis=0)
    return {
        "correlation": correlation,
        "sigma": sigma,
        "predictions": sum(map(len, losses)),
        "p50_loss_over_pooled": mean[0] / mean[2],
        "p90_loss_over_pooled": mean[1] / mean[3],
        "p50_least_over_pooled": mean[4] / mean[2],
        "p90_least_over_pooled": mean[5] / mean[3],
        "p50_coverage": mean[6],
        "p90_coverage": mean[7],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "length_prediction.json")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    cases = [(c, s) for c in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8) for s in (0.7, 1.0, 1.3)]
    rows = []
    for correlation, sigma in track(cases, "predicting"):
        seeds = [play(correlation, sigma, seed) for seed in range(options.seeds)]
        rows.append({key: float(np.mean([row[key] for row in seeds])) for key in seeds[0]})
    overall = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if "loss" in key or "least" in key}
    document = {
        "benchmark": "length_prediction",
        "title": "Remaining lengths: pinball loss over that of a pooled estimator",
        "simulated": True,
        "environment": environment(),
        "seeds": options.seeds,
        **{f"mean_{key}": value for key, value in overall.items()},
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(overall, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
