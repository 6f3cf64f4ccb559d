"""The scalars of each step: they reset, and over all steps they add up to the whole run's report."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pivot.observe.metrics import PREFIX, RunningMetrics
from verl_pivot.observe.report import build_report
from verl_pivot.observe.timeline import build_timeline


def collected(events, at):
    """Metrics collected at the times ``at``, without their prefix, and the lengths of the stretches."""
    metrics, results, waiting = RunningMetrics(), [], list(events)
    for now_s in at:
        while waiting and waiting[0]["t_s"] <= now_s:
            metrics.observe(waiting.pop(0))
        found = metrics.collect(now_s)
        assert all(name.startswith(PREFIX) and isinstance(value, float) for name, value in found.items())
        results.append({name.removeprefix(PREFIX): value for name, value in found.items()})
    return results


def test_nothing_before_the_run_starts():
    assert RunningMetrics().collect(1.0) == {}


def test_first_step_by_hand():
    metrics = RunningMetrics()
    slots = [{"slot": i, "role": "rollout", "can_host": []} for i in range(2)]
    sample = {"role": "rollout", "status": "serving", "running": 3, "waiting": 0, "tokens_per_s": 1.0}
    for event in [
        {"t_s": 0.0, "kind": "run_start", "run_id": "r", "slots": slots, "config": {}},
        {"t_s": 1.0, "kind": "load", "slots": {0: sample, "1": {**sample, "running": 0}}, "queued": {}},
        {"t_s": 4.0, "kind": "plan", "reason": "judge", "shifts": 1},
        {
            "t_s": 6.0,
            "kind": "shift",
            "slot": 1,
            "source": "rollout",
            "target": "genrm",
            "t_start_s": 4.0,
            "duration_s": 2.0,
            "aborted": 5,
            "outcome": "done",
        },
        {"t_s": 7.0, "kind": "publish", "version": 4, "duration_s": 0.1, "bytes": 10},
        {"t_s": 7.5, "kind": "served", "slot": 0, "role": "rollout", "version": 3},
        {"t_s": 7.6, "kind": "served", "slot": 1, "role": "genrm", "version": 0},
    ]:
        metrics.observe(event)
    found = metrics.collect(10.0)
    expected = {
        "slots/rollout": 1.4,
        "slots/genrm": 0.4,
        "slots/train": 0,
        "slots/failed": 0,
        "busy/rollout": 10 / 14,
        "busy/genrm": 0,
        "idle_slot_s/rollout": 4,
        "shift_seconds": 2,
        "shifts/rollout_to_genrm": 1,
        "shifts/genrm_to_train": 0,
        "sequences_migrated": 5,
        "plan/shifts": 1,
        "policy_version": 4,
        "versions_served/min": 3,
        "versions_served/max": 3,
    }
    assert {name: found[PREFIX + name] for name in expected} == pytest.approx(expected)
    assert PREFIX + "busy/train" not in found
    again = metrics.collect(12.0)
    assert again[PREFIX + "shifts/rollout_to_genrm"] == again[PREFIX + "plan/shifts"] == 0
    assert (again[PREFIX + "slots/rollout"], again[PREFIX + "slots/genrm"]) == (1.0, 1.0)
    assert again[PREFIX + "busy/rollout"] == 1.0  # the last sample still speaks for slot 0


@pytest.fixture(scope="module")
def run(made_up_run):
    return made_up_run(4, 3)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.floats(0, 1), max_size=6))
def test_stretches_of_any_length_add_up_to_the_run(run, cuts):
    at = [run[-1]["t_s"] * cut for cut in [*sorted(cuts), 1.0]]
    results = collected(run, at)
    report = build_report(run)
    for name, total in (("sequences_migrated", report["sequences_migrated"]), ("failures", 1)):
        assert sum(r[name] for r in results) == total
    for direction, count in report["shift_counts"].items():
        assert sum(r["shifts/" + direction.replace("->", "_to_")] for r in results) == count
    lengths = [end - start for start, end in zip([0.0, *at], at, strict=False)]
    for length, r in zip(lengths, results, strict=True):
        if length > 1e-6:
            held = sum(r[f"slots/{state}"] for state in ("rollout", "genrm", "train", "failed"))
            assert held * length + r["shift_seconds"] == pytest.approx(4 * length)
    assert results[-1]["policy_version"] == 3


def test_steps_cut_at_their_ends_agree_with_the_whole_timeline(run):
    ends = [e["t_s"] for e in run if e["kind"] == "step"]
    whole = build_timeline(run)
    for i, r in enumerate(collected(run, ends)):
        start_s = ends[i - 1] if i else 0.0
        train = sum(
            max(0.0, min(part.end_s, ends[i]) - max(part.start_s, start_s))
            for row in whole.intervals.values()
            for part in row
            if part.state == "train"
        )
        assert r["slots/train"] * (ends[i] - start_s) == pytest.approx(train)
        assert r["busy/train"] == pytest.approx(whole.busy_fraction()["train"], abs=0.1)
