"""The search for the best split of the slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_cases import scenario

from verl_pivot.sim.deployments import Deployment, Split
from verl_pivot.sim.result import SimResult
from verl_pivot.sim.search import best_split, first_guess

SCENARIO = scenario()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_splits_are_judged_by_whole_bunches_of_steps(staleness: int) -> None:
    tried: list[SimResult] = []
    best_split(replace(SCENARIO, staleness=staleness), Deployment.DISAGGREGATED, tries=2, on_try=tried.append)
    assert len(tried) == 2
    for result in tried:
        assert len(result.steps_s) >= 3 and len(result.steps_s) % (staleness + 1) == 0


def test_a_search_ends_at_the_best_that_it_tried() -> None:
    tried: list[SimResult] = []
    start = Split(SCENARIO.slots - 2, 1, 1)
    best = best_split(SCENARIO, Deployment.DISAGGREGATED, tries=5, also=[start], on_try=tried.append)
    assert {start, first_guess(SCENARIO)} <= {result.split for result in tried} and len(tried) <= 5
    assert best == max(tried, key=lambda result: result.tokens_per_s).split
