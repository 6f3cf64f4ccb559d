"""Pages of the simulated benchmarks say what they are and what stands beside them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import render
from benchmarks.simulated_cluster import PAIRS, WORKLOADS, gains_of, published_like, row_of, scenario_of
from benchmarks.simulated_random import interval, summary
from benchmarks.simulated_sensitivity import BASE, JUDGEMENT, RESPONSE, variants
from verl_pivot.sim.deployments import Deployment, Split
from verl_pivot.sim.ledger import Ledger
from verl_pivot.sim.result import SimResult


def result(deployment: Deployment, tokens_per_s: float) -> SimResult:
    ledger = Ledger(0.3, 0.1, 0.05, 0.05, 0.0, 0.3, 0.05, 0.05, 0.1)
    return SimResult(deployment, Split(4, 2, 2), 2, tokens_per_s, 100.0, (90.0, 110.0), 80.0, 10, 100, 0, ledger)


def test_a_cluster_page_has_gains_and_published_ranges() -> None:
    made = [
        row_of(PAIRS[0], "long tail", 2, which, result(deployment, tokens))
        for deployment, which, tokens in (
            (Deployment.COLOCATED, "best", 50.0),
            (Deployment.DISAGGREGATED, "published-like", 80.0),
            (Deployment.HARMONIC, "best", 100.0),
            (Deployment.HARMONIC, "published-like", 100.0),
            (Deployment.LOOKAHEAD, "best", 110.0),
            (Deployment.LOOKAHEAD, "published-like", 90.0),
        )
    ]
    gains = gains_of(made)
    assert [gain["gain"] for gain in gains] == [2.0, 1.25] and gains[0]["most_there_is"] == 1.25
    assert [gain["lookahead_gain"] for gain in gains] == [2.2, 1.125]
    document: dict[str, Any] = {"benchmark": "simulated_cluster", "simulated": True, "notes": ["ours"], "rows": made}
    page = render.render({"x.json": {**document, "gains": gains}})
    assert "**Simulated**, not measured." in page and "| 2.00 | 2.20 | 1.81 to 2.05 |" in page
    assert "Qwen2.5-1.5B judged by GLM-Z1-9B, long tail, staleness 2" in page


def test_a_fidelity_page_counts_what_is_right() -> None:
    phases = {"measured": {"until training": 6.0, "judging": 0.0}, "simulated": {"until training": 7.5, "judging": 0.0}}
    rows = [
        {"deployment": "a", "measured_s": 10.0, "simulated_s": 11.0, "miss": 0.1, "phases_s": phases},
        {"deployment": "b", "measured_s": 10.0, "simulated_s": 13.0, "miss": 0.3},
    ]
    document = {
        "benchmark": "simulator_fidelity",
        "simulated": True,
        "notes": [],
        "within": 0.15,
        "rows": rows,
        "other_fits": {"one run": {"a": 0.2, "b": -0.2}},
        "clear_pairs": 1,
        "clear_pairs_reversed": [],
    }
    page = render.render({"x.json": {**document, "same_ranking": True}})
    assert "1 of 2 step times are within 15%; the ranking is the same." in page
    assert "| `b` | 10.0 | 13.0 | +30% |" in page and "| one run | +20% | -20% |" in page
    assert "| until training | 6.0 | 7.5 |" in page and "judging" not in page
    page = render.render({"x.json": {**document, "same_ranking": False}})
    assert "the same as far as it was measured clearly (1 of 1 pairs" in page
    page = render.render({"x.json": {**document, "same_ranking": False, "clear_pairs_reversed": [["a", "b"]]}})
    assert "1 clear differences are reversed" in page


def test_a_page_of_random_workloads_shows_the_losers() -> None:
    case = {"policy": "p", "gpus": 8, "staleness": 1, "sigma": 0.5, "split": "1/1/1"}
    even = {"over_fixed": 1.0, "over_fixed_within": [0.9, 1.1]}
    overs = [(at, 1.0 + 0.1 * at) for at in (-2, 0, 1)]
    rows = [
        {**case, **even, "seed": at, "over_harmonic": over, "over_harmonic_within": [over - 0.05, over + 0.05]}
        for at, over in overs
    ]
    found = summary(rows)
    assert found["clearly_lost_to"] == {"harmonic": [-2], "fixed": []}
    assert found["clearly_won_over"] == {"harmonic": [1], "fixed": []}
    page = render.render({"x.json": {**found, "rows": rows}})
    row = "| -2 | p | 8 | 1 | 0.5 | 1/1/1 | 0.800 (0.75 to 0.85) | 1.000 (0.90 to 1.10) |"
    assert row in page and "| 1 | p |" not in page
    assert "worst 0.80" in page and "at least 0.99 in 67%" in page and "1 are clearly won and 1 clearly lost" in page


def test_the_interval_of_a_ratio_is_over_whole_bunches() -> None:
    """Steps within a bunch may trade time without a difference of the bunch."""
    ours = (1.0, 3.0, 2.0, 2.0, 3.0, 1.0)
    low, high = interval(ours, tuple(2 * at for at in (2.0, 2.0, 1.0, 3.0, 2.0, 2.0)), 2)
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)
    low, high = interval(ours, (2.0, 2.0, 2.0, 6.0, 5.0, 5.0), 2)
    assert low < (4 / 4 * 8 / 4 * 10 / 4) ** (1 / 3) < high


def test_scenarios_of_all_pairs_are_possible() -> None:
    for pair in PAIRS:
        for workload in WORKLOADS.values():
            scenario = scenario_of(pair, workload, 2)
            assert published_like(scenario.slots).slots == scenario.slots


def test_every_variant_changes_one_thing() -> None:
    found = variants()
    base = found.pop(BASE)
    assert len(found) >= 10
    for name, scenario in found.items():
        changed = [field for field in vars(base) if getattr(scenario, field) != getattr(base, field)]
        assert len(changed) == 1, name


def test_a_sensitivity_page_has_both_planners_beside_what_is_published() -> None:
    row = {"changed": BASE, "split": "16/8/8", "harmonic_bound_fraction": 0.5, "lookahead_bound_fraction": 0.6}
    page = render.render(
        {
            "x.json": {
                "benchmark": "simulated_sensitivity",
                "simulated": True,
                "policy": "p",
                "judge": "j",
                "gpus": 128,
                "staleness": 2,
                "assumed": {"response": vars(RESPONSE), "judgement": vars(JUDGEMENT)},
                "published": {"colocated": [1.81, 2.05]},
                "rows": [{**row, "harmonic_over_colocated": 1.5, "lookahead_over_colocated": 1.7}],
            }
        }
    )
    assert "| *published* | 1.81 to 2.05 |" in page and "| as assumed | 1.50 / 1.70 | 0.50 / 0.60 |" in page
    assert "responses of median 3000 tokens and sigma 0.9" in page
