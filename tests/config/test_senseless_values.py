"""Values of the right type that no run can use: each is one error before Ray, and what is next to it is none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from config_cases import found

from verl_pivot.config.findings import errors_of

RS, ROLLOUT, JUDGE, ACTOR = (
    "trainer.resource_shift",
    "actor_rollout_ref.rollout",
    "reward.reward_model",
    "actor_rollout_ref.actor",
)
NAME, GPUS, TP = "trainer.experiment_name", "n_gpus_per_node", "tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("device", "option", "value", "in_way_out"),
    [
        # replicas
        ("gpu", f"{ROLLOUT}.{TP}", 0, "at least 1"),
        ("gpu", f"{ROLLOUT}.{TP}", -2, "at least 1"),
        ("gpu", f"{ROLLOUT}.data_parallel_size", 0, "at least 1"),
        ("gpu", f"{ROLLOUT}.pipeline_model_parallel_size", 0, "at least 1"),
        ("gpu", f"{JUDGE}.rollout.{TP}", 0, "at least 1"),
        ("gpu", f"{JUDGE}.rollout.data_parallel_size", 0, "at least 1"),
        # pools
        ("gpu", f"{ROLLOUT}.{GPUS}", 0, f"{ROLLOUT}.nnodes=0"),
        ("gpu", f"{ROLLOUT}.{GPUS}", -2, f"{ROLLOUT}.nnodes=0"),
        ("gpu", f"{ROLLOUT}.nnodes", -1, "use 0"),
        ("gpu", f"{JUDGE}.{GPUS}", 0, f"{JUDGE}.enable_resource_pool=false"),
        ("gpu", f"{JUDGE}.{GPUS}", -4, f"{JUDGE}.enable_resource_pool=false"),
        ("gpu", f"{JUDGE}.nnodes", -1, f"{JUDGE}.enable_resource_pool=false"),
        # counts
        ("cpu", f"{ROLLOUT}.n", 0, "number of responses to a prompt"),
        ("cpu", f"{ROLLOUT}.n", -1, "number of responses to a prompt"),
        ("cpu", f"{ROLLOUT}.n", None, "number of responses to a prompt"),
        ("gpu", f"{ROLLOUT}.max_num_seqs", 0, "number of sequences"),
        ("gpu", f"{ROLLOUT}.max_num_seqs", None, "number of sequences"),
        ("gpu", f"{ROLLOUT}.max_num_seqs", 1.5, "number of sequences"),
        ("gpu", f"{JUDGE}.rollout.max_num_seqs", 0, "number of requests"),
        ("gpu", f"{ROLLOUT}.agent.num_workers", 0, "number of processes"),
        ("gpu", "reward.num_workers", -1, "number of processes"),
        ("gpu", f"{ACTOR}.ulysses_sequence_parallel_size", 0, "number of training GPUs"),
        # own options
        ("cpu", f"{RS}.slots.cpu_share", math.nan, "0.5"),
        ("gpu", f"{RS}.staleness", 1001, "default"),
        ("gpu", f"{RS}.train.poll_interval_s", 61.0, "default"),
        ("gpu", f"{RS}.engine.kv_cache_bytes", 2**20 - 1, "default"),
        ("gpu", f"{RS}.engine.kv_cache_bytes", 0, "default"),
        ("gpu", f"{RS}.store.directory", "", "/dev/shm/verl_pivot"),
        ("gpu", f"{RS}.store.directory", "5", "/dev/shm/verl_pivot"),
        ("gpu", f"{RS}.store.directory", "dev/shm/mine", "/dev/shm/verl_pivot"),
        # the run's folder
        ("gpu", NAME, None, f"{NAME}=my_run"),
        ("gpu", NAME, "", f"{NAME}=my_run"),
        ("gpu", NAME, ".", f"{NAME}=my_run"),
        ("gpu", NAME, "..", f"{NAME}=my_run"),
        ("gpu", NAME, "../other", f"{NAME}=my_run"),
        ("gpu", NAME, "mine/../..", f"{NAME}=my_run"),
        ("gpu", NAME, "/elsewhere", f"{NAME}=my_run"),
    ],
)
def test_it_is_one_error_with_its_option_and_a_way_out(device: str, option: str, value: Any, in_way_out: str) -> None:
    findings = found(device, {option: value})
    assert [(finding.severity, finding.option) for finding in findings] == [("error", option)]
    assert in_way_out in findings[0].way_out


@pytest.mark.parametrize(
    "changes",
    [
        {f"trainer.{GPUS}": -1},
        {f"trainer.{GPUS}": 0},
        {"trainer.nnodes": -1},
        {"trainer.nnodes": -1, f"trainer.{GPUS}": -4},
    ],
)
def test_training_needs_gpus_whatever_the_product_is(changes: dict[str, int]) -> None:
    (finding,) = found("gpu", changes)
    assert (finding.option, finding.problem) == (f"trainer.nnodes x trainer.{GPUS}", "there is no GPU to train on")


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("gpu", {f"{ROLLOUT}.nnodes": 0, f"{ROLLOUT}.{GPUS}": 0}),
        ("gpu", {f"{JUDGE}.enable_resource_pool": False, f"{JUDGE}.nnodes": 0, f"{JUDGE}.{GPUS}": 0}),
        # all slots in the train pool
        ("gpu", {f"{ROLLOUT}.nnodes": 0, f"{JUDGE}.enable_resource_pool": False, f"{JUDGE}.nnodes": 0}),
        ("cpu", {f"{ROLLOUT}.nnodes": 0, f"{JUDGE}.enable_resource_pool": False, f"{JUDGE}.nnodes": 0}),
        # of a judge that is not there
        ("gpu", {f"{JUDGE}.enable": False, f"{JUDGE}.rollout.{TP}": 0, f"{JUDGE}.rollout.max_num_seqs": 0}),
        ("gpu", {f"{JUDGE}.enable": False, f"{JUDGE}.enable_resource_pool": True, f"{JUDGE}.{GPUS}": 0}),
        ("cpu", {f"{ROLLOUT}.n": 1, f"{ROLLOUT}.max_num_seqs": 1, "reward.num_workers": 1}),
        ("gpu", {f"{RS}.staleness": 1000, f"{RS}.train.poll_interval_s": 60.0, f"{RS}.engine.kv_cache_bytes": 2**20}),
        ("gpu", {NAME: "group/mine"}),
        ("gpu", {NAME: "a/../b"}),
        ("gpu", {NAME: "..mine"}),
        ("gpu", {NAME: 5}),
    ],
)
def test_what_is_next_to_it_is_none(device: str, changes: dict[str, Any]) -> None:
    assert errors_of(found(device, changes)) == []
