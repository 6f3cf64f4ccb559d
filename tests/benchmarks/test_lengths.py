from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.deployments.lengths import LengthScheme
from benchmarks.deployments.workload import Workload, question

SCHEME = LengthScheme(p50_tokens=60, sigma=1.0, max_tokens=1000)


def test_lengths_have_the_median_and_the_tail_of_a_truncated_lognormal():
    lengths = sorted(SCHEME.tokens("prompt", i) for i in range(20_000))
    assert statistics.median(lengths) == pytest.approx(60, rel=0.05)
    # 60 exp(1.645) = 311 before truncation, which moves it by little
    assert lengths[19_000] == pytest.approx(307, rel=0.08)
    assert 900 < lengths[-1] <= 1000
    # truncated, not clipped: the limit is no frequent value
    assert lengths.count(1000) < 10


def test_a_length_depends_on_its_key_and_the_seed_only():
    assert SCHEME.tokens("p", 1) == LengthScheme(60, 1.0, 1000).tokens("p", 1)
    by_key = [SCHEME.tokens("p", i) for i in range(50)]
    assert len(set(by_key)) > 30
    assert by_key != [LengthScheme(60, 1.0, 1000, seed=1).tokens("p", i) for i in range(50)]
    # ("a", "bc") and ("ab", "c") are different keys
    assert [SCHEME.tokens("a", f"b{i}") for i in range(20)] != [SCHEME.tokens("ab", i) for i in range(20)]


@given(p50=st.integers(4, 200), above=st.integers(0, 800), sigma=st.floats(0.05, 3.0), key=st.text(max_size=8))
def test_lengths_stay_within_their_limits(p50: int, above: int, sigma: float, key: str):
    scheme = LengthScheme(p50, sigma, p50 + above)
    assert 4 <= scheme.tokens(key) <= p50 + above


@pytest.mark.parametrize(
    "fields", [dict(p50_tokens=60, sigma=1, max_tokens=50), dict(p50_tokens=60, sigma=0, max_tokens=100)]
)
def test_impossible_schemes_are_refused(fields: dict[str, float]):
    with pytest.raises(ValueError, match="LengthScheme"):
        LengthScheme(**fields)


def test_the_workload_says_how_many_tokens_a_step_has():
    work = Workload(prompts_per_step=2, responses_per_prompt=3, dataset_prompts=4)
    by_hand = [work.rollout.tokens(question(i, work.seed), s) for i in range(4) for s in range(3)]
    assert work.expected_tokens(2)["response_tokens_per_step"] == sum(by_hand) / 2
    assert len({question(i, 0) for i in range(200)}) == 200
