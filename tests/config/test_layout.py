from __future__ import annotations

from typing import Any

import pytest
from config_cases import good, put

from verl_pivot.config.findings import ConfigRefused
from verl_pivot.config.layout import layout_findings, layout_from_config, total_gpus

ROLLOUT, JUDGE, TP = "actor_rollout_ref.rollout", "reward.reward_model", "tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("changes", "gpus_per_slot", "counts"),
    [
        ({}, 2, (2, 2, 2)),
        ({f"{ROLLOUT}.nnodes": 0}, 2, (2, 0, 2)),
        ({f"{JUDGE}.enable": False}, 2, (2, 2, 0)),
        ({f"{JUDGE}.enable_resource_pool": False}, 2, (2, 2, 0)),
        ({f"{JUDGE}.rollout.{TP}": 4}, 4, (1, 1, 1)),
        ({f"{JUDGE}.rollout.{TP}": 1}, 2, (2, 2, 2)),
        ({f"{JUDGE}.enable": False, f"{JUDGE}.rollout.{TP}": 8}, 2, (2, 2, 0)),
        ({f"{ROLLOUT}.{TP}": 1, f"{ROLLOUT}.data_parallel_size": 4}, 4, (1, 1, 1)),
        ({f"{ROLLOUT}.{TP}": 1, f"{JUDGE}.rollout.{TP}": 1}, 1, (4, 4, 4)),
        ({"trainer.resource_shift.slots.gpus_per_slot": 4}, 4, (1, 1, 1)),
        ({f"{ROLLOUT}.nnodes": 2, "trainer.nnodes": 3}, 2, (6, 4, 2)),
    ],
)
def test_pools_become_slots(changes: dict[str, Any], gpus_per_slot: int, counts: tuple[int, int, int]) -> None:
    config = good("gpu", changes)
    layout = layout_from_config(config)
    assert layout.gpus_per_slot == gpus_per_slot
    assert (layout.train_slots, layout.rollout_slots, layout.genrm_slots) == counts
    assert layout.shared_slots == counts[1] + counts[2]
    assert [slot.slot_id for slot in layout.slots] == list(range(sum(counts)))
    assert len(layout.slots) * gpus_per_slot == total_gpus(config)


def test_first_roles_and_nodes() -> None:
    layout = layout_from_config(good("gpu", {"trainer.nnodes": 2}))
    assert [(slot.pool, slot.first_role, slot.node) for slot in layout.slots] == [
        ("train", "rollout", 0),
        ("train", "rollout", 0),
        ("train", "rollout", 1),
        ("train", "rollout", 1),
        ("rollout", "rollout", 0),
        ("rollout", "rollout", 0),
        ("genrm", "genrm", 0),
        ("genrm", "genrm", 0),
    ]
    assert layout.rollout_replicas_per_slot == layout.judge_replicas_per_slot == 1


def test_smaller_judge_has_several_replicas_on_a_slot() -> None:
    layout = layout_from_config(good("gpu", {f"{JUDGE}.rollout.{TP}": 1}))
    assert (layout.rollout_replicas_per_slot, layout.judge_replicas_per_slot) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "option", "in_problem", "in_way_out"),
    [
        (
            {"trainer.n_gpus_per_node": 0},
            "trainer.nnodes x trainer.n_gpus_per_node",
            "no GPU to train on",
            "at least 1",
        ),
        ({"trainer.nnodes": 0}, "trainer.nnodes x trainer.n_gpus_per_node", "no GPU to train on", "at least 1"),
        ({"trainer.n_gpus_per_node": 5}, "trainer.n_gpus_per_node", "1 GPU(s) of each node", "multiple of 2"),
        ({f"{ROLLOUT}.n_gpus_per_node": 3}, f"{ROLLOUT}.n_gpus_per_node", "rollout pool", "multiple of 2"),
        ({f"{JUDGE}.n_gpus_per_node": 3}, f"{JUDGE}.n_gpus_per_node", "genrm pool", "multiple of 2"),
        ({f"{JUDGE}.n_gpus_per_node": 1}, f"{JUDGE}.n_gpus_per_node", "does not fit on one node", "at least 2"),
        ({f"{ROLLOUT}.{TP}": 8}, "trainer.n_gpus_per_node", "does not fit on one node", "at least 8"),
        (
            {"trainer.resource_shift.slots.gpus_per_slot": 1},
            f"{ROLLOUT}.{TP}",
            "larger than a slot of 1",
            "slots.gpus_per_slot=2",
        ),
        (
            {f"{JUDGE}.rollout.{TP}": 3, "trainer.resource_shift.slots.gpus_per_slot": 4},
            f"{JUDGE}.rollout.{TP}",
            "would idle",
            "divides 4",
        ),
        ({f"{ROLLOUT}.{TP}": 4, f"{JUDGE}.rollout.{TP}": 3}, f"{JUDGE}.rollout.{TP}", "would idle", "divides 4"),
        (
            {"trainer.resource_shift.slots.gpus_per_slot": -1},
            "trainer.resource_shift.slots.gpus_per_slot",
            "fewer than one",
            "use 0",
        ),
    ],
)
def test_bad_layouts_name_the_option_and_the_way_out(
    changes: dict[str, Any], option: str, in_problem: str, in_way_out: str
) -> None:
    config = good("gpu", changes)
    finding = next(finding for finding in layout_findings(config) if finding.option == option)
    assert finding.severity == "error"
    assert in_problem in finding.problem
    assert in_way_out in finding.way_out
    with pytest.raises(ConfigRefused, match="verl-pivot refuses"):
        layout_from_config(config)


def test_way_out_of_a_remainder_works() -> None:
    config = good("gpu", {"trainer.n_gpus_per_node": 5})
    put(config, "trainer.n_gpus_per_node", 6)
    assert layout_from_config(config).train_slots == 3
