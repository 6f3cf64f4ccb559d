"""The planner that looks ahead, and the projection under it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from core_cases import GENRM, INFERENCE, ROLLOUT, TRAIN, fleet, slot, snapshot
from numpy.typing import NDArray

from verl_pivot.core.backlog import MAX_VALUES, Backlog, GroupBacklog
from verl_pivot.core.costs import DecodeCost, ShiftCosts
from verl_pivot.core.fluid import Candidates, Fluid, Projection
from verl_pivot.core.lookahead import LookaheadPlanner
from verl_pivot.core.options import again_s
from verl_pivot.core.plan import Plan
from verl_pivot.core.role_model import RoleModel
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, SlotStatus, SlotView, Snapshot, TrainView
from verl_pivot.core.training_flow import TrainModel

COST = DecodeCost(floor_s=0.01, base_s=0.002, per_seq_s=0.001)
SETTINGS = PlannerSettings(name="lookahead")
NO_TRAINING = TrainModel(0, False, 0.0, 1.0, 0.0, 1e9, 1, 1, 0.0, 0.0, 0.0)


def backlog(sequences: int, tokens: float, new: float = 300.0) -> Backlog:
    return Backlog(np.full(sequences, tokens), 1.0, np.array([new]), 100.0)


def model(work: Backlog, prefill_s_per_token: float = 0.0) -> RoleModel:
    return RoleModel(COST, 500.0, 64.0, prefill_s_per_token, work)


def look(
    rollout: list[float],
    genrm: list[float],
    work: Mapping[Role, Backlog],
    horizon_s: float = 60.0,
    train: TrainModel = NO_TRAINING,
    **changes: object,
) -> Projection:
    n = len(rollout)
    zero = np.zeros(n)
    candidates = Candidates(
        np.array(rollout),
        np.array(genrm),
        np.array(rollout),
        np.array(genrm),
        zero,
        zero,
        zero,
        zero,
        zero,
        np.zeros(n, bool),
        np.zeros(n, bool),
        np.ones(n),
    )
    candidates = replace(candidates, **changes)  # type: ignore[arg-type]
    roles = {role: model(work[role]) for role in (ROLLOUT, GENRM)}
    return Fluid(roles, train, candidates, 1e9, 1.0).project(np.full(120, horizon_s / 120))


def test_equal_sequences_end_when_the_decode_cost_says() -> None:
    work = {ROLLOUT: backlog(32, 1000.0, new=1.0), GENRM: replace(backlog(0, 0.0), new_tokens=np.array([1.0]))}
    result = look([2.0, 4.0], [1.0, 1.0], work)
    slower, faster = (1000 * COST.step_latency_s(32 / n, 0) for n in (2, 4))
    assert result.finish_s == pytest.approx([slower, faster], abs=1.0)


def test_useful_work_is_what_was_generated() -> None:
    work = {ROLLOUT: backlog(64, 400.0, new=1.0), GENRM: replace(backlog(0, 0.0), new_tokens=np.array([1.0]))}
    result = look([2.0], [2.0], work, horizon_s=120.0)
    peak = COST.tokens_per_s(64, 64 * 500)
    assert result.work[0] == pytest.approx(64 * 400 / peak, rel=0.05)


def test_more_slots_are_never_later_and_work_never_exceeds_time() -> None:
    work = {ROLLOUT: backlog(100, 800.0), GENRM: backlog(40, 300.0)}
    slots = [1.0, 2.0, 4.0, 8.0, 16.0]
    result = look(slots, slots, work)
    assert (np.diff(result.finish_s) <= 1e-6).all()
    assert (result.work <= 60.0 * 2 * np.array(slots) + 1e-6).all()


def test_prefill_of_what_was_cut_off_is_paid_for() -> None:
    work = {ROLLOUT: backlog(100, 800.0), GENRM: backlog(40, 300.0)}
    result = look([4.0, 4.0], [4.0, 4.0], work, horizon_s=15.0, rollout_debt_s=np.array([0.0, 40.0]))
    assert result.work[1] < result.work[0] - 15 and result.finish_s[1] > result.finish_s[0]


def groups_of(rollout_tokens: NDArray[np.float64], due: int = 0) -> GroupBacklog:
    """Groups with judgements of one token; the last ``due`` of them may not wait for a later step."""
    count = len(rollout_tokens)
    return GroupBacklog(rollout_tokens, np.ones(count), np.arange(count) >= count - due)


def training(**changes: object) -> TrainModel:
    """Eight groups of which four make a batch; two batches a step."""
    groups = groups_of(np.linspace(100.0, 800.0, 8))
    model = TrainModel(4, False, 0.0, 5.0, 0.0, 4, 2, 2, 64.0, 2.0, 1.0, groups)
    return replace(model, **changes)  # type: ignore[arg-type]


WORK = {ROLLOUT: backlog(64, 800.0, new=1.0), GENRM: replace(backlog(0, 0.0), new_tokens=np.array([1.0]))}


def test_batches_begin_when_the_slowest_of_their_groups_is_through() -> None:
    """Both batches of the step, one after the other, and then new prompts."""
    token_s = COST.step_latency_s(64 / 4, 0)
    early = look([4.0], [1.0], WORK, horizon_s=400 * token_s + 4.0, train=training())
    late = look([4.0], [1.0], WORK, horizon_s=400 * token_s + 8.0, train=training())
    assert (early.updates[0], late.updates[0]) == (0, 1)
    both = look([4.0], [1.0], WORK, horizon_s=800 * token_s + 12.0, train=training())
    assert both.updates[0] == 2


def test_what_is_due_holds_the_last_batch_of_a_step() -> None:
    groups = groups_of(np.array([10.0] * 11 + [700.0]), due=1)
    token_s = COST.step_latency_s(64 / 4, 0)
    early = look([4.0], [1.0], WORK, horizon_s=600 * token_s, train=training(groups=groups, update_s=1.0))
    late = look([4.0], [1.0], WORK, horizon_s=700 * token_s + 1.5, train=training(groups=groups, update_s=1.0))
    assert (early.updates[0], late.updates[0]) == (1, 2)


def test_lent_slots_are_taken_back_and_paid_for() -> None:
    lends = {"lends_now": np.ones(1, bool), "lends_again": np.ones(1, bool)}
    kept = look([4.0], [1.0], WORK, train=training())
    lent = look([4.0], [1.0], WORK, train=training(is_lent=True), **lends, lent_rollout=np.array([4.0]))
    dear = look(
        [4.0], [1.0], WORK, train=training(is_lent=True, to_train_s=10.0), **lends, lent_rollout=np.array([4.0])
    )
    assert lent.updates[0] == kept.updates[0] == dear.updates[0] == 2
    assert lent.finish_s[0] < kept.finish_s[0] < dear.finish_s[0], "they help, unless the way to and fro is long"


def test_deferring_saves_a_lease_where_the_second_batch_is_late() -> None:
    """Half of the groups are through at once, half at the end: taking the slots twice costs two ways to and fro."""
    work = {**WORK, ROLLOUT: backlog(64, 3000.0, new=1.0)}
    groups = groups_of(np.array([100.0] * 4 + [3000.0] * 4))
    dear = training(groups=groups, is_lent=True, to_train_s=20.0, from_train_s=20.0)
    both = np.ones(2, bool)
    options = {
        "lends_now": both,
        "lends_again": both,
        "waits_for": np.array([1.0, 2.0]),
        "lent_rollout": np.array([4.0, 4.0]),
    }
    result = look([4.0, 4.0], [1.0, 1.0], work, horizon_s=160.0, train=dear, **options)
    assert result.updates.tolist() == [2.0, 2.0]
    assert result.finish_s[1] < result.finish_s[0] - 5


def test_a_backlog_is_thinned_out_and_keeps_its_sum() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 1, (3000, 5))
    thinned = Backlog.of(lengths, np.array([100.0]), 10.0)
    assert len(thinned.remaining_tokens) == MAX_VALUES and thinned.sequences == pytest.approx(3000)
    assert thinned.tokens == pytest.approx(lengths.mean(axis=1).sum(), rel=0.03)


def view(slots: list[SlotView], rollout: Backlog, genrm: Backlog, **changes: object) -> Snapshot:
    made = snapshot(slots, cost=COST, shift_costs=ShiftCosts(default_s=1.0), now_s=100.0)
    values: dict[str, object] = {
        "backlog": {ROLLOUT: rollout, GENRM: genrm},
        "prefill_s_per_token": {ROLLOUT: 1e-5, GENRM: 1e-5},
        "batch_limit": {ROLLOUT: 64.0, GENRM: 64.0},
        "staleness": 1,
    }
    return replace(made, **{**values, **changes})  # type: ignore[arg-type]


def test_a_role_without_work_gives_its_slots() -> None:
    plan = LookaheadPlanner(SETTINGS).plan(view(fleet({ROLLOUT: 4, GENRM: 4}), backlog(200, 2000.0), backlog(0, 0.0)))
    assert plan.shifts and all(shift.target is ROLLOUT and shift.source is GENRM for shift in plan.shifts)
    assert "to rollout" in plan.reason


def test_a_role_with_work_and_no_slot_gets_some() -> None:
    slots = fleet({ROLLOUT: 6}, {ROLLOUT: 2})
    plan = LookaheadPlanner(SETTINGS).plan(view(slots, backlog(12, 3000.0), backlog(100, 2000.0)))
    assert plan.shifts and {shift.target for shift in plan.shifts} == {GENRM}


def test_balanced_roles_stay_and_say_so() -> None:
    slots = fleet({ROLLOUT: 4, GENRM: 4}, {ROLLOUT: 30, GENRM: 30})
    plan = LookaheadPlanner(SETTINGS).plan(view(slots, backlog(120, 5000.0, 5000.0), backlog(120, 5000.0, 5000.0)))
    assert plan.is_empty and plan.reason.startswith("no shift, because ")


def test_moving_must_pay_for_what_it_cuts_off() -> None:
    """The same imbalance, with sequences that are dear to move and with cheap ones."""
    slots = [slot(n, ROLLOUT if n < 6 else GENRM, 20 if n < 6 else 60, can_host=INFERENCE) for n in range(8)]
    work = (backlog(12, 3000.0), backlog(240, 6000.0, 4000.0))
    cheap = LookaheadPlanner(SETTINGS).plan(view(slots, *work))
    dear = LookaheadPlanner(SETTINGS).plan(view(slots, *work, prefill_s_per_token={ROLLOUT: 0.05, GENRM: 0.05}))
    assert cheap.shifts and dear.is_empty


@pytest.mark.parametrize("ready", [6, 8, 12])
def test_an_idle_slot_goes_now_although_a_later_plan_could_send_it(ready: int) -> None:
    """Training has batches for minutes, and after them waits for a step whose responses all run on one slot. Any plan
    until then could send the idle judge, so one that counts on later plans sees no reason to; nor does one that looks
    at the end of its horizon alone, where by chance an update ends just in time or not."""
    slots = fleet({ROLLOUT: 1, GENRM: 2, TRAIN: 5}, {ROLLOUT: 60})
    slots = [slot if slot.role is TRAIN else replace(slot, can_host=INFERENCE) for slot in slots]
    groups = GroupBacklog(np.full(8, 4000.0), np.full(8, 300.0), np.ones(8, dtype=bool))
    train = TrainView(
        LeaseState.HELD, ready, 2, groups_open=8, update_s=50.0, busy_s=50.0, batches_per_step=4, new_prompts=60
    )
    now = view(slots, backlog(60, 4000.0), backlog(0, 0.0), train=train, groups=groups)
    plan = LookaheadPlanner(SETTINGS).plan(now)
    assert [(shift.source, shift.target) for shift in plan.shifts] == [(GENRM, ROLLOUT)], plan.reason


def test_requests_that_begin_again_pay_for_what_they_had_generated() -> None:
    judge = slot(0, GENRM, 10)  # 100 tokens in each, ten a second for each
    judge = replace(judge, load=replace(judge.load, context_tokens=3000))
    goes_on = view([judge, slot(1, ROLLOUT)], backlog(10, 100.0), backlog(10, 100.0))
    again = replace(goes_on, begins_again=frozenset({GENRM}))
    assert again_s(goes_on, judge) == pytest.approx(0.03)
    assert again_s(again, judge) == pytest.approx(0.03 + (3000 - 10 * 100) / 100)
    assert again_s(again, slot(1, ROLLOUT, 10)) == again_s(goes_on, slot(1, ROLLOUT, 10))


@pytest.mark.parametrize("tokens", [4000, 8000])
def test_judges_that_would_begin_again_stay_where_others_would_move(tokens: int) -> None:
    """The same imbalance: judgements that take their tokens along, and such that lose them."""
    slots = [slot(n, GENRM if n < 6 else ROLLOUT, 20 if n < 6 else 60, can_host=INFERENCE) for n in range(8)]
    slots = [replace(s, load=replace(s.load, context_tokens=tokens * s.load.running)) for s in slots]
    goes_on = view(slots, backlog(240, 6000.0, 4000.0), backlog(60, 500.0))
    again = replace(goes_on, begins_again=frozenset({GENRM}))
    moved, still_moved = (len(LookaheadPlanner(SETTINGS).plan(now).shifts) for now in (goes_on, again))
    assert moved > still_moved


def test_without_predicted_work_it_is_the_harmonic_rule() -> None:
    slots = fleet({ROLLOUT: 4, GENRM: 1}, {GENRM: 8})
    plain = snapshot(slots, genrm=8, cost=COST)
    from verl_pivot.core.harmonic import HarmonicPlanner

    assert LookaheadPlanner(SETTINGS).plan(plain) == HarmonicPlanner(SETTINGS).plan(plain)


def test_floors_are_kept() -> None:
    slots = fleet({ROLLOUT: 4, GENRM: 8})
    settings = replace(SETTINGS, margin=0.0, genrm_floor=7)
    plan = LookaheadPlanner(settings).plan(view(slots, backlog(400, 4000.0), backlog(0, 0.0)))
    assert len(plan.shifts) == 1


def test_cooldown_and_shifts_in_flight_hold_everything_but_starving_roles() -> None:
    slots = fleet({ROLLOUT: 4, GENRM: 4}, {ROLLOUT: 60, GENRM: 1})
    work = (backlog(240, 4000.0), backlog(4, 100.0))
    recent = LookaheadPlanner(SETTINGS).plan(view(slots, *work, last_shift_s=95.0))
    assert "cooldown 5.0 s left" in recent.reason
    moving = [replace(slots[0], status=SlotStatus.SHIFTING, target=GENRM), *slots[1:]]
    assert "1 slot still shifting" in LookaheadPlanner(SETTINGS).plan(view(moving, *work)).reason


WANTED = TrainView(LeaseState.WANTED, 8, 8, groups_open=24, update_s=5.0, batches_to_publish=4)


def planned_lease(train: TrainView, **changes: object) -> Plan:
    """All slots are lent, and shifts take long."""
    slots = fleet({ROLLOUT: 8}, {ROLLOUT: 20})
    dear = ShiftCosts(default_s=20.0)
    work = (backlog(160, 50.0), backlog(0, 0.0))
    values: dict[str, object] = {"train": train, "staleness": 0, "shift_costs": dear, **changes}
    return LookaheadPlanner(SETTINGS).plan(view(slots, *work, **values))


def test_training_waits_for_batches_that_are_almost_there_and_says_so() -> None:
    plan = planned_lease(WANTED)
    assert plan.is_empty and "training waits for 2 batches: 8 groups ready" in plan.reason


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        (WANTED, {"staleness": 1}),
        (replace(WANTED, wanted_s=1000.0), {}),
        (replace(WANTED, batches_to_publish=1), {}),
    ],
)
def test_training_gets_its_slots_where_it_may_not_wait(train: TrainView, changes: dict[str, object]) -> None:
    plan = planned_lease(train, **changes)
    assert {shift.target for shift in plan.shifts} == {TRAIN}


def responses_over(genrm_slots: float, shift_s: float, arrivals: float = 0.0) -> float:
    """When judgements alone are done, with three slots of rollout that have nothing to do."""
    work = {ROLLOUT: replace(backlog(0, 0.0), new_tokens=np.array([100.0])), GENRM: backlog(40, 1000.0)}
    roles = {role: model(work[role]) for role in (ROLLOUT, GENRM)}
    row, none = np.ones(1), np.zeros(1)
    no = np.zeros(1, bool)
    candidates = Candidates(
        3 * row, genrm_slots * row, 3 * row, genrm_slots * row, none, none, none, none, none, no, no, row
    )
    train = replace(NO_TRAINING, arrivals=arrivals)
    return float(Fluid(roles, train, candidates, 1e9, shift_s).project(np.full(1200, 0.1)).finish_s[0])


def test_slots_that_rollout_needs_no_more_judge_after_a_shift_while_the_others_go_on() -> None:
    on_four = 1000 * COST.step_latency_s(10, 0)
    assert responses_over(1.0, 0.0) == pytest.approx(on_four, abs=0.3)
    on_one_s = COST.step_latency_s(40, 0)
    shifted = 5.0 + (1000 - 5.0 / on_one_s) * COST.step_latency_s(10, 0)
    assert responses_over(1.0, 5.0) == pytest.approx(shifted, abs=0.3)
    assert responses_over(1.0, 5.0, arrivals=10.0) == pytest.approx(1000 * on_one_s, abs=0.3), "they are needed again"
