"""Each figure of a cost book comes back out of a made-up log, or is named as one that the log cannot tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_pivot.core.cost_book import TrainCost
from verl_pivot.core.costs import DecodeCost
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.fit import RunLog
from verl_pivot.sim.fit_changes import collect_s, feed_s
from verl_pivot.sim.fit_engines import EngineCosts, engine_costs
from verl_pivot.sim.fit_training import TrainSample, train_cost

DECODE = DecodeCost(base_s=0.02, per_seq_s=0.0005, attn_s_per_token=1e-7)
ANSWER_TOKENS = 50.0


def load_event(t_s: float, running: float, tokens_per_s: float = 0.0, role: str = "rollout", **queued: int) -> Any:
    load = {
        "role": role,
        "status": "serving",
        "running": running,
        "waiting": 0,
        "tokens_per_s": tokens_per_s,
        "context_tokens": 300.0 * running,
        "first_token_s": 5.0,
    }
    return {"t_s": t_s, "kind": "load", "slots": {"0": load}, "queued": queued}


def engine_log(prompt_tokens: float, prefill_s: float, noise: float, speed: float = 1.0) -> RunLog:
    """An engine whose batch grows and shrinks: every stretch takes what its steps and new prompts cost."""
    rng = np.random.default_rng(3)
    events, now_s, running, requests = [load_event(0.0, 4.0)], 0.0, 4.0, 0.0
    for _ in range(300):
        then = float(rng.integers(1, 60))
        steps, mean = float(rng.integers(20, 60)), (running + then) / 2
        made = steps * mean
        came = max(0.0, then - running + made / ANSWER_TOKENS)
        seconds = steps * DECODE.step_latency_s(mean, 300 * mean) + came * prompt_tokens * prefill_s
        seconds *= float(np.exp(noise * rng.standard_normal())) / speed
        now_s, running, requests = now_s + seconds, then, requests + came
        events.append(load_event(now_s, then, made / seconds))
    tokens = round(requests * ANSWER_TOKENS)
    events.append({"t_s": now_s, "kind": "step", "responses": round(requests), "response_tokens": tokens})
    return RunLog(events, speed)


def fitted(prompt_tokens: float, prefill_s: float, noise: float, speed: float = 1.0) -> EngineCosts:
    return engine_costs([engine_log(prompt_tokens, prefill_s, noise, speed)], Role.ROLLOUT, prompt_tokens)


@pytest.mark.parametrize("speed", [1.0, 1.3])
def test_prefill_is_told_from_growing_batches(speed: float) -> None:
    found = fitted(1000.0, 4e-5, noise=0.05, speed=speed)
    assert found.doubts == () and found.prefill_s_per_token == pytest.approx(4e-5, rel=0.25)
    assert found.decode.step_latency_s(30, 9000) == pytest.approx(DECODE.step_latency_s(30, 9000), rel=0.1)


def test_prefill_of_short_prompts_is_doubted_and_bounded() -> None:
    found = fitted(2.0, 4e-5, noise=0.3)
    assert len(found.doubts) == 1 and found.doubts[0].startswith("roles.rollout.prefill_s_per_token cannot be told")
    assert found.prefill_s_per_token <= found.decode.per_seq_s


def samples(cost: TrainCost, pools: dict[int, int], spread: float) -> list[TrainSample]:
    """Seven steps for each pool, which takes its step in so many batches."""
    rng = np.random.default_rng(1)
    found = []
    for slots, updates in pools.items():
        for _ in range(7):
            tokens = 20_000 * float(np.exp(spread * rng.standard_normal()))
            seconds = updates * cost.update_s(tokens / updates, slots) * float(np.exp(0.01 * rng.standard_normal()))
            found.append(TrainSample(seconds, tokens, updates, slots))
    return found


def test_training_is_told_from_unequal_pools_and_batches() -> None:
    true = TrainCost(0.001, 2.0, 0.0004)
    found, doubts = train_cost(samples(true, {1: 4, 2: 4, 4: 1, 8: 2}, spread=0.5))
    assert doubts == ()
    for slots in (1, 2, 4, 8, 16):
        assert found.update_s(20_000, slots) == pytest.approx(true.update_s(20_000, slots), rel=0.05)


def test_a_single_pool_of_equal_steps_leaves_fixed_and_exchange_open() -> None:
    true = TrainCost(0.001, 2.0, 0.0004)
    found, doubts = train_cost(samples(true, {2: 4}, spread=0.005))
    assert [doubt.split()[0] for doubt in doubts] == ["train.fixed_s", "train.exchange_slot_s_per_token"]
    assert found.exchange_slot_s_per_token == 0
    assert 4 * found.update_s(5000, 2) == pytest.approx(4 * true.update_s(5000, 2), rel=0.05)


def test_a_step_is_fed_when_half_of_its_requests_are_there() -> None:
    events: list[Any] = [{"t_s": t_s, "kind": "publish", "duration_s": 0.1} for t_s in (0.0, 10.0, 20.0, 30.0)]
    for start_s in (10.0, 20.0):
        events += [load_event(start_s - 0.5, 2), load_event(start_s + 0.5, 3), load_event(start_s + 1, 4, rollout=6)]
        events.append({"t_s": start_s + 9, "kind": "step", "responses": 16, "response_tokens": 160})
    log = RunLog(sorted(events, key=lambda event: event["t_s"]), 2.0)
    assert feed_s(log) == pytest.approx(2 * 0.75)
    assert feed_s(RunLog([])) is None


def test_a_batch_is_collected_when_training_asks_for_slots() -> None:
    events: list[Any] = [
        load_event(1.0, 5, role="genrm"),
        load_event(1.4, 0, role="genrm"),
        {"t_s": 2.0, "kind": "lease", "state": "wanted"},
        load_event(5.0, 5, role="genrm"),
        {"t_s": 5.2, "kind": "lease", "state": "wanted"},  # others are still judged: nothing is said
        load_event(5.4, 5, role="genrm"),
    ]
    assert collect_s(RunLog(events)) == pytest.approx(0.8)
    assert collect_s(RunLog(events[3:])) is None
