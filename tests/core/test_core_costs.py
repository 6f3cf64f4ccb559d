from __future__ import annotations

import numpy as np
import pytest
from core_cases import GENRM, ROLLOUT, TRAIN
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pivot.core.costs import DecodeCost, DecodeCostFitter, ShiftCosts, ShiftCostTracker, fit_decode_cost

PUBLISHED = {
    "Qwen2.5-1.5B": (1.77, 1.07, 0.0266, 0.475, 18.8),
    "Qwen2.5-7B": (5.14, 3.07, 0.080, 0.506, 37.1),
    "Qwen3-30B-A3B": (3.36, 3.63, 0.0414, 1.20, 19.7),
    "Qwen2.5-72B": (9.02, 7.20, 0.125, 1.49, 26.3),
}
KEYS = ("floor_ms", "base_ms", "per_seq_ms", "attn_base_ms", "attn_ns_per_token")


def published(model: str) -> DecodeCost:
    return DecodeCost.from_json_entry(dict(zip(KEYS, PUBLISHED[model], strict=True)))


@pytest.mark.parametrize(
    ("running", "context_tokens", "latency_ms"),
    [
        (1, 1000, 5.14 + 0.506 + 0.0371),  # the floor: 3.07 + 0.08 is below it
        (100, 0, 3.07 + 8.0 + 0.506),
        (100, 400_000, 3.07 + 8.0 + 0.506 + 14.84),
    ],
)
def test_latency_follows_the_published_form(running: int, context_tokens: int, latency_ms: float) -> None:
    cost = published("Qwen2.5-7B")
    assert cost.step_latency_s(running, context_tokens) == pytest.approx(latency_ms * 1e-3)
    assert cost.tokens_per_s(running, context_tokens) == pytest.approx(running / (latency_ms * 1e-3))


def test_nothing_running_gives_no_tokens() -> None:
    assert published("Qwen2.5-7B").tokens_per_s(0, 0) == 0.0


def test_decode_cost_round_trips() -> None:
    cost = published("Qwen2.5-72B")
    assert DecodeCost.from_dict(cost.to_dict()) == cost


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"base_s": -1.0}, "base_s"),
        ({"base_s": 1.0, "attn_s_per_token": float("nan")}, "attn_s_per_token"),
        ({"attn_s_per_token": 1.0}, "no time"),
    ],
)
def test_impossible_costs_are_refused(values: dict[str, float], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        DecodeCost(**values)


def test_incomplete_entry_names_model_and_keys() -> None:
    with pytest.raises(ValueError, match=r"tiny lacks floor_ms, attn_ns_per_token"):
        DecodeCost.from_json_entry({"model": "tiny", "base_ms": 1, "per_seq_ms": 1, "attn_base_ms": 1})


def feed(fitter: DecodeCostFitter, truth: DecodeCost, seed: int, samples: int, outliers: float = 0.05) -> None:
    """Noisy reports over a wide range of loads; outliers are reports across a pause, 3 to 10 times too slow."""
    random = np.random.default_rng(seed)
    for index in range(samples):
        running = int(np.exp(random.uniform(0, np.log(256))))
        context_tokens = int(running * random.uniform(200, 12_000))
        latency_s = truth.step_latency_s(running, context_tokens) * random.normal(1.0, 0.03)
        if random.random() < outliers:
            latency_s *= random.uniform(3, 10)
        fitter.add(running, context_tokens, running / latency_s, at_s=0.25 * index)


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("seed", range(3))
def test_fit_recovers_latency_from_noise_and_outliers(model: str, seed: int) -> None:
    truth, fitter = published(model), DecodeCostFitter()
    feed(fitter, truth, seed, samples=600)
    fitted = fitter.fit()
    assert fitted is not None
    for running in (1, 4, 16, 64, 200):
        for mean_context in (500, 4_000, 10_000):
            tokens = running * mean_context
            expected = truth.step_latency_s(running, tokens)
            assert fitted.step_latency_s(running, tokens) == pytest.approx(expected, rel=0.10)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 50_000), st.floats(0.1, 1e4)), min_size=8, max_size=60))
def test_fit_is_never_negative_monotone_and_deterministic(reports: list[tuple[int, int, float]]) -> None:
    first, second = DecodeCostFitter(), DecodeCostFitter()
    for at_s, (running, context_tokens, rate) in enumerate(reports):
        first.add(running, context_tokens, rate, at_s)
        second.add(running, context_tokens, rate, at_s)
    fitted = first.fit()
    assert fitted is not None  # DecodeCost itself refuses negative coefficients
    assert fitted == second.fit()
    assert 0 < fitted.step_latency_s(1, 0) <= fitted.step_latency_s(64, 0) <= fitted.step_latency_s(64, 50_000)


def test_no_fit_before_enough_samples() -> None:
    fitter = DecodeCostFitter(min_samples=8)
    for index in range(7):
        fitter.add(4, 400, 40.0, index)
    assert fitter.fit() is None
    fitter.add(4, 400, 40.0, 8)
    assert fitter.fit() is not None


def test_one_operating_point_gives_a_constant_latency() -> None:
    fitter = DecodeCostFitter()
    for index in range(20):
        fitter.add(4, 400, 40.0, index)
    fitted = fitter.fit()
    assert fitted == DecodeCost(base_s=0.1)


def test_fits_are_renewed_only_after_a_while() -> None:
    fitter = DecodeCostFitter(refit_s=5.0)
    for index in range(8):
        fitter.add(4, 400, 40.0, 0.1 * index)
    first = fitter.fit()
    for index in range(8):
        fitter.add(4, 400, 80.0, 1.0 + 0.1 * index)
    assert fitter.fit() is first
    fitter.add(4, 400, 80.0, 6.0)
    assert fitter.fit() == DecodeCost(base_s=0.05)


def test_useless_reports_are_ignored() -> None:
    fitter = DecodeCostFitter(min_samples=1)
    for running, context, rate in [(0, 0, 0.0), (4, 100, 0.0), (4, -1, 5.0), (4, 100, float("inf"))]:
        fitter.add(running, context, rate, 0.0)
    assert list(fitter.samples()) == []


def test_a_long_time_at_one_point_does_not_flush_the_others() -> None:
    truth, fitter = published("Qwen2.5-7B"), DecodeCostFitter()
    feed(fitter, truth, seed=0, samples=300)
    for index in range(20_000):
        fitter.add(2, 9_000, truth.tokens_per_s(2, 9_000), 100.0 + index)
    fitted = fitter.fit()
    assert fitted is not None
    assert fitted.step_latency_s(128, 800_000) == pytest.approx(truth.step_latency_s(128, 800_000), rel=0.10)


def test_the_point_not_visited_for_longest_goes_first() -> None:
    fitter = DecodeCostFitter(max_cells=2, cell_samples=1)
    for at_s, running in enumerate([1, 64, 1, 8]):
        fitter.add(running, 100 * running, 10.0, at_s)
    assert {running for running, _, _ in fitter.samples()} == {1, 8}


@pytest.mark.parametrize("factor", [4.0, 0.3])  # a pause within the report; a batch that shrank just before it
def test_wrong_reports_barely_pull_the_fit(factor: float) -> None:
    truth = published("Qwen2.5-7B")
    running = np.tile(np.arange(1.0, 65.0), 4)
    context_tokens = running * np.repeat([500.0, 2_000.0, 4_000.0, 8_000.0], 64)
    latency_s = np.array([truth.step_latency_s(r, c) for r, c in zip(running, context_tokens, strict=True)])
    latency_s[::7] *= factor
    fitted = fit_decode_cost(running, context_tokens, latency_s)
    assert fitted.step_latency_s(32, 64_000) == pytest.approx(truth.step_latency_s(32, 64_000), rel=0.05)


def test_memory_is_bounded() -> None:
    fitter = DecodeCostFitter(max_cells=16, cell_samples=4)
    feed(fitter, published("Qwen2.5-7B"), seed=0, samples=3_000)
    assert len(list(fitter.samples())) <= 16 * 4


def test_newer_samples_of_a_point_replace_older_ones() -> None:
    fitter = DecodeCostFitter(cell_samples=8)
    for index in range(16):
        fitter.add(4, 400, 40.0 if index < 8 else 80.0, index)
    assert {latency for _, _, latency in fitter.samples()} == {0.05}


def test_shift_seconds_fall_back_to_the_default() -> None:
    costs = ShiftCosts({(ROLLOUT, GENRM): 2.0}, default_s=7.0)
    assert costs.seconds(ROLLOUT, GENRM) == 2.0
    assert costs.seconds(GENRM, ROLLOUT) == 7.0


def test_tracker_smooths_and_hands_out_frozen_copies() -> None:
    tracker = ShiftCostTracker(default_s=7.0, migrate_s=5.0)
    before = tracker.costs()
    tracker.add_shift(ROLLOUT, TRAIN, 10.0)
    tracker.add_shift(ROLLOUT, TRAIN, 20.0)
    tracker.add_migration(1.0)
    after = tracker.costs()
    assert (before.seconds(ROLLOUT, TRAIN), before.migrate_s) == (7.0, 5.0)
    assert after.seconds(ROLLOUT, TRAIN) == pytest.approx(12.0)
    assert after.migrate_s == 1.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_tracker_refuses_impossible_durations(seconds: float) -> None:
    with pytest.raises(ValueError, match="duration"):
        ShiftCostTracker().add_migration(seconds)
