"""What holds for any snapshot, and for any planner that has a name."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from core_cases import GENRM, ROLLOUT, TRAIN
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pivot.config.schema import PlannerConfig
from verl_pivot.core.backlog import Backlog
from verl_pivot.core.costs import DecodeCost, ShiftCosts
from verl_pivot.core.outlook import look_ahead
from verl_pivot.core.registry import make_planner, planner_names
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import (
    INFERENCE_ROLES,
    LeaseState,
    ReplicaLoad,
    Role,
    RoleDemand,
    SlotStatus,
    SlotView,
    Snapshot,
    TrainView,
)

NOW_S = 100.0
roles = st.sampled_from(list(Role))
costs = st.builds(
    DecodeCost,
    floor_s=st.floats(0.0, 0.05),
    base_s=st.floats(0.001, 0.05),
    per_seq_s=st.floats(0.0, 0.02),
    attn_s_per_token=st.floats(0.0, 1e-5),
)


@st.composite
def slot_views(draw: st.DrawFn, slot_id: int) -> SlotView:
    role = draw(roles)
    status = draw(st.sampled_from([SlotStatus.SERVING] * 6 + [SlotStatus.SHIFTING, SlotStatus.FAILED]))
    can_host = draw(st.frozensets(roles)) | {role}
    running = draw(st.integers(0, 8)) if role is not TRAIN and status is SlotStatus.SERVING else 0
    load = ReplicaLoad(running, draw(st.integers(0, 2)) if running else 0, 50 * running, 10.0 * running)
    target = draw(st.sampled_from(sorted(can_host))) if status is SlotStatus.SHIFTING else None
    return SlotView(slot_id, role, status, can_host, draw(st.floats(0.0, NOW_S)), load, target)


@st.composite
def backlogs(draw: st.DrawFn) -> Backlog:
    lengths = draw(st.lists(st.floats(1.0, 5000.0), max_size=20))
    new = draw(st.lists(st.floats(1.0, 5000.0), min_size=1, max_size=5))
    return Backlog(np.sort(np.array(lengths)), draw(st.floats(0.2, 3.0)), np.sort(np.array(new)), 200.0)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    count = draw(st.integers(1, 6))
    slots = tuple(draw(slot_views(3 * index)) for index in range(count))
    demand = {role: RoleDemand(draw(st.integers(0, 20)), draw(st.integers(0, 20))) for role in INFERENCE_ROLES}
    train = TrainView(draw(st.sampled_from(list(LeaseState))), draw(st.integers(0, 4)), draw(st.integers(0, 4)))
    decode = draw(st.dictionaries(st.sampled_from(INFERENCE_ROLES), costs))
    shift_costs = ShiftCosts(default_s=draw(st.floats(0.0, 10.0)), migrate_s=draw(st.floats(0.0, 5.0)))
    last_shift_s = draw(st.none() | st.floats(0.0, NOW_S))
    backlog = draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(INFERENCE_ROLES, backlogs())))
    return Snapshot(
        NOW_S,
        slots,
        demand,
        train,
        decode,
        shift_costs,
        last_shift_s=last_shift_s,
        backlog=backlog,
        prefill_s_per_token=draw(st.just({}) | st.just(dict.fromkeys(INFERENCE_ROLES, 1e-3))),
        staleness=draw(st.integers(0, 2)),
    )


planner_settings = st.builds(
    PlannerSettings,
    margin=st.sampled_from([0.0, 0.05]),
    cooldown_s=st.sampled_from([0.0, 10.0]),
    immunity_s=st.sampled_from([0.0, 10.0]),
    rollout_floor=st.integers(0, 3),
    genrm_floor=st.integers(0, 3),
)


@pytest.mark.parametrize("name", planner_names())
@settings(max_examples=60, deadline=None)
@given(view=snapshots(), chosen=planner_settings)
def test_every_shift_is_possible(name: str, view: Snapshot, chosen: PlannerSettings) -> None:
    planner = make_planner(name, chosen)
    result = planner.plan(view)
    by_id = {slot.slot_id: slot for slot in view.slots}
    assert max(Counter(shift.slot_id for shift in result.shifts).values(), default=0) <= 1
    for shift in result.shifts:
        slot = by_id[shift.slot_id]
        assert slot.status is SlotStatus.SERVING
        assert (shift.source, shift.target in slot.can_host) == (slot.role, True)
        assert shift.source is not shift.target
        assert "\n" not in shift.reason and shift.reason
    assert "\n" not in result.reason and result.reason
    assert result.reason.startswith("no shift, because ") is result.is_empty
    assert make_planner(name, chosen).plan(view) == planner.plan(view) == result


@settings(max_examples=100, deadline=None)
@given(view=snapshots(), chosen=planner_settings)
def test_harmonic_plans_leave_each_working_role_enough(view: Snapshot, chosen: PlannerSettings) -> None:
    result = make_planner("harmonic", chosen).plan(view)
    before, after = Counter(s.effective_role for s in view.slots), Counter(s.effective_role for s in view.slots)
    for shift in result.shifts:
        after[shift.source] -= 1
        after[shift.target] += 1
    if any(shift.target is TRAIN for shift in result.shifts):
        assert view.train.lease is LeaseState.WANTED
        return
    if view.train.lease is not LeaseState.FREE:
        assert after[TRAIN] == before[TRAIN]
    working = look_ahead(view).working
    starved = [role for role in working if not before[role]]
    for role in working:
        if after[role] < min(before[role], max(1, chosen.floor(role))):
            other = GENRM if role is ROLLOUT else ROLLOUT
            assert starved == [other] and after[other] >= 1  # only to feed a role that had nothing
    if any(slot.status is SlotStatus.SHIFTING for slot in view.slots) and result.shifts:
        unused = all(shift.source not in working for shift in result.shifts)
        assert unused or starved or any(before[role] < chosen.floor(role) for role in working)
    assert not any(shift.target not in working for shift in result.shifts)


@settings(max_examples=100, deadline=None)
@given(view=snapshots(), chosen=planner_settings)
def test_a_starving_role_is_fed_whenever_a_slot_may_go(view: Snapshot, chosen: PlannerSettings) -> None:
    """Nothing but training, hosts and the turn of the other role's last slot stands between work and a slot."""
    if view.train.lease is not LeaseState.FREE or 0 < view.train.groups_needed <= view.train.groups_ready:
        return
    result = make_planner("harmonic", chosen).plan(view)
    fed = {shift.target for shift in result.shifts}
    used = {shift.slot_id for shift in result.shifts}
    counts = Counter(slot.effective_role for slot in view.slots)
    for role in look_ahead(view).working:
        if counts[role] or role in fed:
            continue
        for slot in view.slots:
            able = slot.status is SlotStatus.SERVING and role in slot.can_host and slot.slot_id not in used
            assert not able or (slot.role is not TRAIN and slot.since_s + chosen.immunity_s > NOW_S)


def test_settings_mirror_the_configuration() -> None:
    ours, users = fields(PlannerSettings), fields(PlannerConfig)
    assert [(field.name, field.default) for field in ours] == [(field.name, field.default) for field in users]


def test_unknown_planner_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'greedy'.*harmonic, lookahead, phases, static"):
        make_planner("greedy")


@pytest.mark.parametrize("field", ["window_s", "margin", "cooldown_s", "rollout_floor"])
def test_senseless_settings_name_the_field(field: str) -> None:
    with pytest.raises(ValueError, match=rf"planner\.{field} is -1"):
        PlannerSettings(**{field: -1})  # type: ignore[arg-type]
