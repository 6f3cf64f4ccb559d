from __future__ import annotations

import dataclasses

from core_cases import GENRM, ROLLOUT, TRAIN, fleet, lease, slot, snapshot

from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState
from verl_pivot.core.static import StaticPlanner


def test_roles_do_not_follow_the_work() -> None:
    view = snapshot(fleet({ROLLOUT: 1, GENRM: 3, TRAIN: 4}, {ROLLOUT: 60}), rollout=60)
    result = StaticPlanner(PlannerSettings()).plan(view)
    assert result.is_empty
    assert result.reason == "no shift, because roles are static"


def test_a_shared_slot_goes_to_training_and_comes_back() -> None:
    planner = StaticPlanner(PlannerSettings())
    shared, fixed = slot(0, ROLLOUT, 2), slot(1, GENRM, 1, can_host=frozenset({GENRM}))
    idle = snapshot([shared, fixed], rollout=2, genrm=1)
    assert planner.plan(idle).is_empty

    wanted = dataclasses.replace(idle, train=lease(LeaseState.WANTED, 4, 4))
    assert [(s.slot_id, s.target) for s in planner.plan(wanted).shifts] == [(0, TRAIN)]

    training = (dataclasses.replace(shared, role=TRAIN), fixed)
    held = dataclasses.replace(idle, slots=training, train=lease(LeaseState.HELD))
    assert planner.plan(held).reason == "no shift, because training keeps 1 slot of other roles"

    done = dataclasses.replace(held, train=lease(LeaseState.FREE, 0, 4))
    assert [(s.slot_id, s.target) for s in planner.plan(done).shifts] == [(0, ROLLOUT)]
