"""Remaining lengths: calibrated, better with siblings and history than without, bounded, and saved with the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from verl_pivot.core.lengths import LEVELS, LengthPredictor
from verl_pivot.core.prompt_effects import Evidence, Spread, by_siblings, leave_one_out
from verl_pivot.core.survival import SurvivalCurve

MAX_TOKENS = 8000
CHECKS = tuple(int(tokens) for tokens in np.geomspace(30, 4000, 24))


def play(
    predictor: LengthPredictor, lengths: NDArray[np.int64], step: int, checks: tuple[int, ...], prompts: list[int]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """All responses [prompts, n] grow together; at each check (predicted quantiles, true remaining) of the living."""
    n = lengths.shape[1]
    keys = {(step, p, j): int(lengths[p, j]) for p in range(len(prompts)) for j in range(n)}
    for step_key in keys:
        predictor.start(step_key, step_key[:2], prompts[step_key[1]], n)
    alive, seen = sorted(keys, key=keys.__getitem__), []
    for check in checks:
        while alive and keys[alive[0]] <= check:
            predictor.finish(alive[0], keys[alive.pop(0)])
        if not alive:
            return seen
        predictor.progress(dict.fromkeys(alive, check))
        seen.append((predictor.remaining(alive), np.array([keys[key] - check for key in alive], dtype=np.float64)))
    for key in alive:
        predictor.finish(key, keys[key])
    return seen


def draw(rng: np.random.Generator, effects: NDArray[np.float64], n: int, correlation: float) -> NDArray[np.int64]:
    own = rng.standard_normal((len(effects), n))
    logs = 6.5 + 0.8 * (np.sqrt(correlation) * effects[:, None] + np.sqrt(1 - correlation) * own)
    return np.clip(np.exp(logs), 1, MAX_TOKENS).astype(np.int64)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_quantiles_cover_what_they_say(correlation: float) -> None:
    rng = np.random.default_rng(1)
    predictor = LengthPredictor(MAX_TOKENS)
    effects, seen = rng.standard_normal(64), []
    for step in range(8):
        lengths = draw(rng, effects, 8, correlation)
        checked = play(predictor, lengths, step, CHECKS, list(range(64)))
        seen += checked if step >= 2 else []
    predicted, true = np.concatenate([p for p, _ in seen]), np.concatenate([t for _, t in seen])
    covered = (true[:, None] <= predicted).mean(axis=0)
    assert np.abs(covered - np.array(LEVELS)).max() < 0.08, covered


def test_siblings_that_ended_long_make_the_others_long() -> None:
    predictor = LengthPredictor(MAX_TOKENS)
    rng = np.random.default_rng(2)
    for step in range(4):
        play(
            predictor, draw(rng, rng.standard_normal(64), 8, 0.8), step, (), list(range(1000 * step, 1000 * step + 64))
        )
    for group, length in (("long", 4000), ("short", 100)):
        for j in range(4):
            predictor.start((group, j), group, group, 4)
        for j in range(3):
            predictor.finish((group, j), length)
    predictor.progress({("long", 3): 50, ("short", 3): 50})
    long, short = predictor.remaining([("long", 3), ("short", 3)])
    assert long[2] > 5 * short[2]
    # History: the prompt is known when it comes again.
    predictor.finish(("long", 3), 4000)
    predictor.finish(("short", 3), 100)
    known_long, known_short, unknown = predictor.total_of_new(["long", "short", "never seen"])
    assert known_long[2] > 1.5 * unknown[2] > 1.5 * known_short[2]


def test_those_that_still_run_are_not_taken_for_short_ones() -> None:
    """Half of a batch has ended: its mean is not that of the batch."""
    rng = np.random.default_rng(3)
    predictor = LengthPredictor(MAX_TOKENS)
    lengths = draw(rng, np.zeros(64), 8, 0.0)
    keys = {(p, j): int(lengths[p, j]) for p in range(64) for j in range(8)}
    for key in keys:
        predictor.start(key, key[0], key[0], 8)
    half = int(np.median(lengths))
    predictor.progress({key: min(half, length) for key, length in keys.items()})
    for key, length in keys.items():
        if length <= half:
            predictor.finish(key, length)
    fresh = predictor.total_of_new([None])[0]
    assert fresh[2] == pytest.approx(half, rel=0.3)


def test_never_beyond_the_budget_and_never_nothing() -> None:
    predictor = LengthPredictor(100)
    predictor.start("a", "g", "p", 1)
    for tokens in (0, 1, 50, 99):
        predictor.progress({"a": tokens})
        left = predictor.remaining(["a"])[0]
        assert (left >= 1).all() and (left + tokens <= 100).all(), (tokens, left)


def test_memory_is_bounded() -> None:
    predictor = LengthPredictor(1000, window=64, max_prompts=10)
    for prompt in range(200):
        for j in range(2):
            predictor.start((prompt, j), prompt, prompt, 2)
        for j in range(2):
            predictor.finish((prompt, j), 10 + prompt)
    state = predictor.state()
    assert len(state["history"]) == 10 and len(state["ended"]) == 64
    assert not predictor._sequences and not predictor._groups


def test_a_cancelled_sequence_leaves_no_trace() -> None:
    predictor = LengthPredictor(1000)
    for j in range(3):
        predictor.start(j, "g", "p", 3)
    predictor.finish(0, 10)
    predictor.finish(1, 12)
    predictor.cancel(2)
    predictor.cancel("never known")
    assert not predictor._sequences and not predictor._groups


def test_a_resumed_run_goes_on_with_what_was_learned() -> None:
    rng = np.random.default_rng(4)
    predictor = LengthPredictor(MAX_TOKENS)
    for step in range(3):
        play(predictor, draw(rng, rng.standard_normal(32), 8, 0.5), step, (200,), list(range(32)))
    resumed = LengthPredictor(MAX_TOKENS)
    resumed.load(json.loads(json.dumps(predictor.state())))
    prompts = [0, 5, "unknown"]
    assert resumed.total_of_new(prompts) == pytest.approx(predictor.total_of_new(prompts), rel=0.15)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        LengthPredictor(0)


def test_survival_curve_of_a_known_distribution() -> None:
    rng = np.random.default_rng(5)
    true, limit = rng.exponential(1.0, 4000), rng.exponential(1.5, 4000)
    curve = SurvivalCurve.fit(true[true <= limit], limit[true > limit])
    for value in (0.2, 0.7, 1.5, 4.0):
        assert curve.hazard(np.array([value]))[0] == pytest.approx(value, rel=0.12, abs=0.03)
    beyond = curve.quantiles_beyond(np.array([2.0]), np.array([0.5]))[0, 0]
    assert beyond == pytest.approx(2.0 + np.log(2), rel=0.1)  # an exponential forgets how long it has been going


@pytest.mark.parametrize("running", [0, 1, 7])
@pytest.mark.parametrize("ended", [[], [5.0], [7.5, 8.0, 9.0]])
def test_one_sequence_is_expected_as_many_are(running: int, ended: list[float]) -> None:
    """Left out from the start, against taken out of all to first order."""
    spread, level, prior = Spread(0.6, 0.5), 6.0, (0.2, 0.3)
    reached = np.linspace(4.0, 8.0, running + 1)
    evidence = Evidence(
        np.array([prior[0]]),
        np.array([prior[1]]),
        np.array([sum(ended) - len(ended) * level]),
        np.array([float(len(ended))]),
    )
    many = leave_one_out(evidence, np.zeros(running + 1, dtype=np.int64), reached, level, spread)
    for own in range(running + 1):
        others = np.delete(reached, own) - level
        nobody = np.zeros(running, dtype=np.int64)
        one = by_siblings(evidence, nobody, others, np.array([spread.residual]))
        assert level + one.mean[0] == pytest.approx(many.mean[own], abs=0.15)
        assert one.deviation[0] == pytest.approx(many.deviation[own], rel=0.1)


def test_a_name_that_begins_again_elsewhere_leaves_nothing_behind() -> None:
    predictor = LengthPredictor(1000)
    predictor.start("a", "G", "p", 2)
    predictor.start("a", "H", "p", 2)
    predictor.finish("a", 10)
    predictor.start("b", "G", "p", 2)
    assert predictor.remaining(["b"]).shape[0] == 1
