"""The closed form of an engine against one that decodes token by token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pivot.core.cost_book import RoleCosts
from verl_pivot.core.costs import DecodeCost
from verl_pivot.sim.engine import SimEngine, SimSequence

COST = DecodeCost(floor_s=0.005, base_s=0.003, per_seq_s=0.001, attn_base_s=0.0005, attn_s_per_token=2e-6)
SPEC = RoleCosts(COST, prefill_s_per_token=0.0, kv_tokens=100_000, max_sequences=64)


def sequence(key: int, total_tokens: int, prompt_tokens: int = 10) -> SimSequence:
    return SimSequence(key, prompt_tokens, total_tokens)


def run_to_end(engine: SimEngine) -> list[tuple[int, float]]:
    """(key, time) of every sequence as it ends."""
    ends = []
    while math.isfinite(at_s := engine.next_event_s()):
        ends += [(ended.key, at_s) for ended in engine.advance(at_s)]
    return ends


def token_by_token(lengths: list[int], arrivals_s: list[float], prompt_tokens: int = 10) -> dict[int, float]:
    """When each sequence ends, by the definition: a step's latency, then one token for everybody in the batch."""
    now_s, left, ends = 0.0, {}, {}
    context = dict.fromkeys(range(len(lengths)), prompt_tokens)
    pending = sorted(range(len(lengths)), key=lambda key: arrivals_s[key])
    while left or pending:
        if not left:
            now_s = max(now_s, arrivals_s[pending[0]])
        while pending and arrivals_s[pending[0]] <= now_s + 1e-12:
            key = pending.pop(0)
            left[key] = lengths[key]
        now_s += COST.step_latency_s(len(left), sum(context[key] for key in left))
        for key in list(left):
            left[key] -= 1
            context[key] += 1
            if not left[key]:
                del left[key]
                ends[key] = now_s
    return ends


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
@settings(deadline=None)
def test_ends_when_token_by_token_does(lengths: list[int]) -> None:
    engine = SimEngine(SPEC, 0.0)
    for key, length in enumerate(lengths):
        engine.submit(sequence(key, length), 0.0)
    got = dict(run_to_end(engine))
    wanted = token_by_token(lengths, [0.0] * len(lengths))
    assert got == pytest.approx(wanted, rel=1e-6)
    assert engine.counts.generated_tokens == sum(lengths)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 2)), min_size=1, max_size=20),
    st.lists(st.floats(0, 3), max_size=20),
)
@settings(deadline=None)
def test_looking_in_between_changes_nothing(work: list[tuple[int, float]], looks_s: list[float]) -> None:
    """Tokens are conserved and ends are the same, whenever somebody looks."""

    def play(extra_s: list[float]) -> tuple[dict[int, float], int]:
        engine = SimEngine(SPEC, 0.0)
        arrivals = sorted((at_s, key, length) for key, (length, at_s) in enumerate(work))
        moments = sorted([(at_s, 1, key, length) for at_s, key, length in arrivals] + [(t, 0, 0, 0) for t in extra_s])
        ends: dict[int, float] = {}
        for at_s, arrives, key, length in moments:
            while engine.next_event_s() <= at_s:
                event_s = engine.next_event_s()
                ends.update((ended.key, event_s) for ended in engine.advance(event_s))
            engine.advance(at_s)
            if arrives:
                engine.submit(sequence(key, length), at_s)
        ends.update(run_to_end(engine))
        return ends, engine.counts.generated_tokens

    plain, tokens = play([])
    looked_at, same_tokens = play(looks_s)
    assert tokens == same_tokens == sum(length for length, _ in work)
    assert looked_at == pytest.approx(plain, rel=1e-6, abs=1e-6)


def test_evicted_sequences_keep_their_tokens_and_end_elsewhere() -> None:
    first, second = SimEngine(SPEC, 0.0), SimEngine(SPEC, 0.0)
    for key in range(4):
        first.submit(sequence(key, 100 * (key + 1)), 0.0)
    first.advance(0.3)
    evicted = first.evict(0.3)
    assert first.sequences == 0 and math.isinf(first.next_event_s())
    assert all(0 < moved.generated_tokens < moved.total_tokens for moved in evicted)
    for moved in evicted:
        second.submit(moved, 0.3)
    run_to_end(second)
    assert first.counts.generated_tokens + second.counts.generated_tokens == 1000
    assert second.counts.recomputed_tokens == 4 * 10 + first.counts.generated_tokens


def test_what_leaves_before_its_prefill_costs_nothing() -> None:
    """Many sequences came at once, most of them go elsewhere before their turn: the others begin no later for it."""
    busy, alone = (SimEngine(RoleCosts(COST, 1e-2, kv_tokens=10**6, max_sequences=64), 0.0) for _ in range(2))
    alone.submit(sequence(0, 10), 0.0)
    for key in range(40):
        busy.submit(sequence(key, 10), 0.0)
    busy.advance(0.05)
    assert len(busy.evict(0.05, 39)) == 39
    assert busy.next_event_s() == pytest.approx(alone.next_event_s())
    assert busy.counts.prefill_tokens == alone.counts.prefill_tokens == 10


def test_a_full_cache_preempts_the_youngest_and_nothing_is_lost() -> None:
    engine = SimEngine(RoleCosts(COST, 1e-5, kv_tokens=400, max_sequences=64), 0.0)
    for key in range(4):
        engine.submit(sequence(key, 150), 0.0)
    ends = run_to_end(engine)
    assert sorted(key for key, _ in ends) == [0, 1, 2, 3]
    assert ends[0][0] == 0 and engine.counts.preemptions > 0
    assert engine.counts.recomputed_tokens > 0
    assert engine.counts.generated_tokens == 600


def test_new_weights_compute_everything_again() -> None:
    engine = SimEngine(RoleCosts(COST, 1e-3, kv_tokens=10_000, max_sequences=8), 0.0)
    engine.submit(sequence(0, 50), 0.0)
    engine.advance(0.1)
    before_s = engine.next_event_s()
    held = engine.context_tokens
    engine.recompute(0.1)
    assert engine.next_event_s() == pytest.approx(before_s + 1e-3 * held)
    assert engine.counts.recomputed_tokens == held
