"""Whole simulated runs: nothing lost, deterministic, never faster than the bound, faults survived."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import scenario, workload

from verl_pivot.core.snapshot import Role
from verl_pivot.observe.kinds import missing_fields
from verl_pivot.observe.report import build_report
from verl_pivot.sim.deployments import Deployment, Split, lay_out
from verl_pivot.sim.record import Recorder
from verl_pivot.sim.result import measure, run, simulate
from verl_pivot.sim.scenario import SimCosts
from verl_pivot.sim.simulation import Failure, Simulation, SimulationStuck, Warped
from verl_pivot.sim.workload import LengthSpec

SPLIT = Split(2, 3, 3)


@pytest.mark.parametrize("deployment", Deployment)
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_deployment_trains_on_everything_once(deployment: Deployment, staleness: int) -> None:
    case = scenario(staleness=staleness)
    simulation = run(case, deployment, SPLIT, steps=3)
    work = case.workload
    trained = sum(step.groups for step in simulation.trainer.steps)
    assert trained == 3 * work.prompts_per_step
    draws, engines = simulation.draws, {role: simulation.slots.totals(role) for role in (Role.ROLLOUT, Role.GENRM)}
    judged = draws.judgement_tokens[:3].sum()
    assert engines[Role.GENRM].generated_tokens >= judged * 0.9  # a batch may take groups of a later step instead
    held = sum(len(groups) for groups in simulation._judged.values())
    finished = simulation.trainer.groups_seen * work.responses_per_prompt + held
    routers = simulation.slots.routers
    on_the_way = sum(router.queued + router.inflight for router in routers.values())
    assert finished + on_the_way == simulation._submitted_steps * work.prompts_per_step * work.responses_per_prompt


@pytest.mark.parametrize("deployment", [Deployment.COLOCATED, Deployment.HARMONIC, Deployment.LOOKAHEAD])
def test_the_same_seed_gives_the_same_run(deployment: Deployment) -> None:
    first, second = (simulate(scenario(staleness=1), deployment, SPLIT, steps=3, warmup=1) for _ in range(2))
    assert first == second
    assert first != simulate(scenario(staleness=1, seed=1), deployment, SPLIT, steps=3, warmup=1)


@pytest.mark.parametrize("deployment", Deployment)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nothing_is_faster_than_the_bound(deployment: Deployment, staleness: int) -> None:
    result = simulate(scenario(staleness=staleness), deployment, SPLIT, steps=5, warmup=2)
    assert 0 < result.bound_fraction <= 1.02
    shares = vars(result.ledger)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(share >= -0.01 for share in shares.values()), shares


@given(
    st.integers(3, 8),
    st.integers(0, 3),
    st.sampled_from([Deployment.HARMONIC, Deployment.LOOKAHEAD, Deployment.DISAGGREGATED]),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=15)
def test_no_layout_gets_stuck(slots: int, staleness: int, deployment: Deployment, seed: int) -> None:
    case = scenario(gpus=slots, staleness=staleness, seed=seed)
    result = simulate(case, deployment, Split(1, slots - 2, 1), steps=2, warmup=0)
    assert result.tokens_per_s > 0


@pytest.mark.parametrize("deployment", [Deployment.HARMONIC, Deployment.LOOKAHEAD])
@pytest.mark.parametrize("slot_id", [0, 3, 7])
def test_a_slot_that_is_lost_is_planned_around(deployment: Deployment, slot_id: int) -> None:
    simulation = run(scenario(staleness=1), deployment, SPLIT, steps=3, failures=(Failure(20.0, slot_id),))
    assert len(simulation.trainer.steps) == 3
    assert all(shift.slot_id != slot_id or shift.end_s <= 20.0 for shift in simulation.slots.shifts)


def test_a_run_without_judges_says_what_it_waits_for() -> None:
    failures = tuple(Failure(5.0, slot_id) for slot_id in range(5, 8))
    with pytest.raises(SimulationStuck, match=r"wait for genrm.*training \(free\) has \d+ of 4 groups"):
        run(scenario(), Deployment.DISAGGREGATED, SPLIT, steps=2, failures=failures)


def test_a_trainer_whose_last_slot_dies_in_mid_update_is_named() -> None:
    last = run(scenario(), Deployment.HARMONIC, SPLIT, steps=1)
    start_s, end_s = next((start, end) for name, start, end in last.trainer.spans if name == "update")
    failures = tuple(Failure((start_s + end_s) / 2, slot_id) for slot_id in range(SPLIT.train))
    with pytest.raises(SimulationStuck, match=r"step \d of 3 never ends: .*training \(held\)"):
        run(scenario(), Deployment.HARMONIC, SPLIT, steps=3, failures=failures)


def test_shifts_of_more_than_an_hour_are_waited_for() -> None:
    slow = replace(scenario(), costs=SimCosts(to_train_s=5000.0, from_train_s=5000.0))
    assert len(run(slow, Deployment.ENABLE_SWITCH, SPLIT, steps=1).trainer.steps) == 1


@pytest.mark.parametrize("warped", [Warped(3, 1, 1), Warped(1, 3, 1), Warped(1, 1, 3), Warped(1 / 3, 1 / 3, 1 / 3)])
def test_wrong_estimates_cost_what_it_gains_and_no_more(warped: Warped) -> None:
    """Threefold errors, against the harmonic rule with the same ones; right estimates win by a third."""
    case = scenario(staleness=1)
    harmonic = simulate(case, Deployment.HARMONIC, SPLIT, steps=14, warmup=2, warped=warped)
    right = simulate(case, Deployment.LOOKAHEAD, SPLIT, steps=14, warmup=2)
    wrong = simulate(case, Deployment.LOOKAHEAD, SPLIT, steps=14, warmup=2, warped=warped)
    assert right.tokens_per_s > 1.33 * harmonic.tokens_per_s
    assert wrong.tokens_per_s > 0.97 * harmonic.tokens_per_s


def test_equal_lengths_without_prompts_to_judge_reach_the_bound_nearly() -> None:
    """Where nothing is random and nothing shifts, what is left over is known: fixed costs and the last batch."""
    work = workload(response=LengthSpec(500, 0.0, 500), judgement=LengthSpec(1, 0.0, 1))
    result = simulate(scenario(workload=work, staleness=2), Deployment.DISAGGREGATED, Split(2, 5, 1), steps=6, warmup=3)
    assert len(set(round(seconds, 3) for seconds in result.steps_s)) <= 3


def test_events_make_a_report() -> None:
    recorder = Recorder()
    simulation = run(scenario(staleness=1), Deployment.HARMONIC, SPLIT, steps=3, on_plan=recorder.on_plan)
    events = recorder.events(simulation)
    assert not [missing for event in events if (missing := missing_fields(event))]
    report = build_report(events)
    assert report["steps"] == 3 and report["lost"] == 0
    assert sum(report["shift_counts"].values()) == len(simulation.slots.shifts)


def test_no_figures_without_a_step_after_warmup() -> None:
    simulation = Simulation(scenario(), lay_out(Deployment.COLOCATED, SPLIT), steps=1)
    simulation.run()
    with pytest.raises(ValueError, match="warmup is 1: it must be from 0 to 0"):
        measure(simulation, 1)


def test_slots_that_open_at_the_same_time_share_the_work() -> None:
    """Else the first takes all it has room for, and most of it is computed again when the work is evened out."""
    judged = run(scenario(), Deployment.COLOCATED, SPLIT, steps=3).slots.totals(Role.GENRM)
    assert judged.recomputed_tokens < 0.05 * judged.prefill_tokens


def test_handing_work_on_takes_its_time() -> None:
    base = scenario()
    slow = replace(base, costs=replace(base.costs, feed_s=20.0, collect_s=10.0))
    first, second = (simulate(case, Deployment.COLOCATED, SPLIT, steps=4, warmup=1) for case in (base, slow))
    assert second.step_s - first.step_s == pytest.approx(30.0, abs=1.0)
    first, second = (
        simulate(replace(case, staleness=1), Deployment.DISAGGREGATED, SPLIT, steps=6, warmup=2)
        for case in (base, slow)
    )
    assert second.step_s - first.step_s < 30.0  # a part of it passes beside other work


@pytest.mark.parametrize("split", [Split(2, 1, 5), Split(3, 1, 4)])
def test_nothing_shifts_where_steps_are_short_and_shifts_are_dear(split: Split) -> None:
    """A step takes less than twice the way to training and back: fixed pools are best, and the planner leaves them."""
    work = workload(
        response=LengthSpec(300, 0.9, 2000, 0.5), judgement=LengthSpec(200, 0.8, 2000, 0.3), responses_per_prompt=4
    )
    case = scenario(workload=work, staleness=1)
    fixed, ahead, harmonic = (
        simulate(case, deployment, split, steps=20, warmup=4)
        for deployment in (Deployment.DISAGGREGATED, Deployment.LOOKAHEAD, Deployment.HARMONIC)
    )
    assert ahead.tokens_per_s >= 0.98 * fixed.tokens_per_s > 1.5 * harmonic.tokens_per_s
    assert ahead.shifts < 0.1 * harmonic.shifts
