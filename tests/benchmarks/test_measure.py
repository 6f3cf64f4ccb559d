from __future__ import annotations

import pytest

from benchmarks.deployments.measure import StepSample, compare, ratio, summarize
from benchmarks.deployments.probe import SpeedProbe


def sample(step: int, wall_s: float, tokens: int, cpu_s: tuple[float, ...], **more: object) -> StepSample:
    return StepSample(step, wall_s - 0.5, wall_s, tokens, cpu_s, **more)  # type: ignore[arg-type]


def test_bound_is_all_cpu_time_over_all_shares():
    steps = [sample(1, 10.0, 1000, (5.0, 2.0, 1.0, 0.0)), sample(2, 30.0, 3000, (15.0, 5.0, 2.0, 2.0))]
    figures = summarize(steps, n_slots=4, share=0.5)
    assert figures["bound_s"] == pytest.approx(32.0 / (4 * 0.5))
    assert figures["bound_fraction"] == pytest.approx(16.0 / 40.0)
    assert figures["slot_busy_share"] == pytest.approx([20 / 20, 7 / 20, 3 / 20, 2 / 20])
    assert figures["response_tokens_per_s"] == pytest.approx(100.0)
    assert figures["cpu_s_per_1000_tokens"] == pytest.approx(8.0)
    assert figures["step_s"]["mean"] == pytest.approx(19.5)
    assert (figures["step_s"]["min"], figures["step_s"]["max"]) == (9.5, 29.5)


def test_slots_that_never_idle_reach_the_bound():
    steps = [sample(1, 8.0, 100, (4.0, 4.0))]
    assert summarize(steps, n_slots=2, share=0.5)["bound_fraction"] == pytest.approx(1.0)


def test_staleness_roles_and_timings_are_gathered():
    steps = [
        sample(
            1, 1.0, 1, (0.1,), role_cpu_s={"train": 0.1}, timing_s={"gen": 1.0}, staleness_mean=0.0, staleness_max=0
        ),
        sample(
            2, 1.0, 1, (0.1,), role_cpu_s={"train": 0.3}, timing_s={"gen": 2.0}, staleness_mean=1.0, staleness_max=3
        ),
    ]
    figures = summarize(steps, n_slots=1, share=0.5)
    assert figures["role_busy_slots"] == pytest.approx({"train": 0.4 / (0.5 * 2.0)})
    assert figures["timing_s_mean"] == {"gen": 1.5}
    assert (figures["staleness_mean"], figures["staleness_max"]) == (0.5, 3)


def test_no_steps_is_an_error():
    with pytest.raises(ValueError, match="no timed steps"):
        summarize([], 4, 0.5)


def test_ratio_of_equal_steps_has_no_spread():
    result = ratio([(100, 1.0)] * 5, [(100, 2.0)] * 5)
    assert result == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})


def test_ratio_weighs_steps_by_their_time_and_spreads_with_them():
    ours, theirs = [(100, 1.0), (100, 3.0), (100, 2.0)], [(100, 4.0), (100, 4.0), (100, 4.0)]
    result = ratio(ours, theirs)
    assert result["ratio"] == pytest.approx((300 / 6) / (300 / 12))
    assert 4 / 3 <= result["low"] < 2.0 < result["high"] <= 4.0
    assert result == ratio(ours, theirs), "seeded"


def test_every_resource_shift_run_is_compared_with_every_one_of_verl():
    def entry(wall_s: float) -> dict[str, object]:
        return summarize([sample(1, wall_s, 100, (0.1,))], 1, 0.5)

    deployments = {"verl_a": entry(4.0), "verl_b": entry(2.0), "resource_shift_x": entry(1.0)}
    ratios = compare(deployments)
    assert {name: value["ratio"] for name, value in ratios.items()} == {
        "resource_shift_x / verl_a": 4.0,
        "resource_shift_x / verl_b": 2.0,
    }


def test_planners_are_compared_on_the_same_split():
    names = ("resource_shift_lookahead_staleness1_train2", "resource_shift_staleness1_train2", "resource_shift_x")
    deployments = {name: summarize([sample(1, 2.0, 100, (0.1,))], 1, 0.5) for name in names}
    assert list(compare(deployments)) == [f"{names[0]} / {names[1]}"]


def test_a_slower_machine_is_no_slower_deployment():
    """The same work, once at full and once at half speed of the machine."""
    fast = summarize([sample(1, 10.0, 1000, (1.0,), machine_speed=1.0)], 1, 0.5)
    slow = summarize([sample(1, 20.0, 1000, (2.0,), machine_speed=0.5)], 1, 0.5)
    assert slow["equal_speed_tokens_per_s"] == fast["equal_speed_tokens_per_s"] == 100.0
    ratio_of = compare({"resource_shift_x": fast, "verl_a": slow})["resource_shift_x / verl_a"]
    assert (ratio_of["ratio"], ratio_of["as_measured"]) == (1.0, 2.0)


def test_the_probe_measures_a_speed_and_ends():
    probe = SpeedProbe()
    assert 0.05 < probe.take() < 20
    probe.close()
