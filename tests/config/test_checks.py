from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_cases import GIB, GPU_MACHINE, MACHINE, MODEL, found, good

from verl_pivot.config.checks import CHECKS, subject_of
from verl_pivot.config.checks_features import PLANNERS
from verl_pivot.config.findings import error, render, warning
from verl_pivot.config.machine import Machine, ModelOnDisk, filesystem_type, look_at_machine
from verl_pivot.core.registry import planner_names

RS, ROLLOUT, JUDGE, ACTOR = (
    "trainer.resource_shift",
    "actor_rollout_ref.rollout",
    "reward.reward_model",
    "actor_rollout_ref.actor",
)
MISSING = ModelOnDisk("/gone", True, False, False, None)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_good_configurations_have_no_findings(device: str) -> None:
    assert found(device, {}) == []


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_check_has_something_to_say(device: str) -> None:
    subject = subject_of(good(device), MACHINE if device == "cpu" else GPU_MACHINE)
    assert all(check.says(subject) for check in CHECKS)


def test_planners_to_choose_from_exist() -> None:
    """There are more of them: baselines, and what is tried out in simulations."""
    assert set(PLANNERS) <= set(planner_names())


@pytest.mark.parametrize(
    ("device", "changes", "option", "in_way_out"),
    [
        # trainer and features
        ("gpu", {"trainer.use_v1": False}, "trainer.use_v1", "true"),
        ("gpu", {"trainer.v1.resource_shift.interval": 3}, "trainer.v1.resource_shift.interval", RS),
        ("gpu", {f"{ROLLOUT}.name": "sglang"}, f"{ROLLOUT}.name", "=vllm"),
        ("gpu", {f"{ROLLOUT}.name": "???"}, f"{ROLLOUT}.name", "=vllm"),
        ("gpu", {f"{JUDGE}.rollout.name": "sglang"}, f"{JUDGE}.rollout.name", "=vllm"),
        ("gpu", {"distillation.enabled": True}, "distillation.enabled", "=false"),
        ("gpu", {f"{ROLLOUT}.disaggregation.enabled": True}, f"{ROLLOUT}.disaggregation.enabled", "=false"),
        (
            "gpu",
            {f"{JUDGE}.rollout.disaggregation.enabled": True},
            f"{JUDGE}.rollout.disaggregation.enabled",
            "=false",
        ),
        (
            "gpu",
            {"trainer.v1.sampler.custom_sampler.path": "mine.py"},
            "trainer.v1.sampler.custom_sampler.path",
            "=null",
        ),
        (
            "gpu",
            {"trainer.v1.separate_async.hybrid_rollout.enable_switch": True},
            "trainer.v1.separate_async.hybrid_rollout.enable_switch",
            "=false",
        ),
        (
            "gpu",
            {f"{ROLLOUT}.agent.custom_async_server.path": "mine.py"},
            f"{ROLLOUT}.agent.custom_async_server.path",
            "=null",
        ),
        ("gpu", {"actor_rollout_ref.model.lora_rank": 16}, "actor_rollout_ref.model.lora_rank", "lora.merge=true"),
        ("gpu", {"actor_rollout_ref.model.lora.rank": 16}, "actor_rollout_ref.model.lora.rank", "lora.merge=true"),
        # own options
        ("gpu", {f"{RS}.engine.host": "shared"}, f"{RS}.engine.host", "auto"),
        (
            "gpu",
            {f"{RS}.planner.name": "static", f"{JUDGE}.enable_resource_pool": False, f"{JUDGE}.nnodes": 0},
            f"{RS}.planner.name",
            "enable_resource_pool=true",
        ),
        ("gpu", {f"{RS}.store.shard_bytes": 1000}, f"{RS}.store.shard_bytes", "default"),
        ("cpu", {f"{RS}.slots.cpu_share": 0.01}, f"{RS}.slots.cpu_share", "0.5"),
        ("cpu", {f"{RS}.slots.cpu_share": 9.0}, f"{RS}.slots.cpu_share", "0.5"),
        ("gpu", {f"{RS}.planner.name": "magic"}, f"{RS}.planner.name", "harmonic, lookahead, static"),
        ("gpu", {f"{RS}.engine.host": "moon"}, f"{RS}.engine.host", "per_replica"),
        ("gpu", {f"{RS}.staleness": -1}, f"{RS}.staleness", "0 or more"),
        ("gpu", {f"{RS}.shift.drain_s": 0.0}, f"{RS}.shift.drain_s", "default"),
        ("gpu", {f"{RS}.store.keep_versions": 0}, f"{RS}.store.keep_versions", "default"),
        (
            "gpu",
            {f"{RS}.planner.rollout_floor": 4, f"{RS}.planner.genrm_floor": 3},
            f"{RS}.planner.rollout_floor + genrm_floor",
            "lower",
        ),
        # reward model
        ("gpu", {f"{JUDGE}.model_path": None}, f"{JUDGE}.model_path", f"set {JUDGE}.model_path"),
        ("gpu", {"reward.custom_reward_function.path": None}, "reward.custom_reward_function.path", "router"),
        ("gpu", {f"{JUDGE}.nnodes": 0}, f"{JUDGE}.nnodes", "enable_resource_pool=false"),
        # memory
        ("gpu", {f"{ACTOR}.fsdp_config.param_offload": False}, f"{ACTOR}.fsdp_config.param_offload", "=true"),
        ("gpu", {f"{ACTOR}.fsdp_config.optimizer_offload": False}, f"{ACTOR}.fsdp_config.optimizer_offload", "=true"),
        ("gpu", {f"{ROLLOUT}.enable_sleep_mode": False}, f"{ROLLOUT}.enable_sleep_mode", "=true"),
        ("gpu", {f"{JUDGE}.rollout.free_cache_engine": False}, f"{JUDGE}.rollout.free_cache_engine", "=true"),
        ("cpu", {f"{ROLLOUT}.enable_sleep_mode": True}, f"{ROLLOUT}.enable_sleep_mode", "pivot_platform"),
        ("cpu", {f"{JUDGE}.rollout.enable_sleep_mode": True}, f"{JUDGE}.rollout.enable_sleep_mode", "pivot_platform"),
        # batches
        ("cpu", {"data.train_batch_size": 12}, "data.train_batch_size", "multiple of 8"),
        ("cpu", {"data.train_batch_size": 0}, "data.train_batch_size", "number of prompts"),
        ("cpu", {f"{RS}.train.mini_batches_per_step": 0}, f"{RS}.train.mini_batches_per_step", "use 1"),
        ("cpu", {f"{RS}.train.mini_batches_per_step": 2}, "data.train_batch_size", "data.train_batch_size=16"),
        ("cpu", {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "divisor of 32"),
        (
            "cpu",
            {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 3},
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            "divisor of 32",
        ),
        (
            "cpu",
            {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 3},
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
            "divisor of 32",
        ),
        (
            "gpu",
            {f"{ACTOR}.ppo_mini_batch_size": 1, f"{ROLLOUT}.n": 2},
            f"{ACTOR}.ppo_mini_batch_size",
            "multiple of 4",
        ),
        # Ray and platform
        ("cpu", {"ray_kwargs.ray_init.num_gpus": 2}, "ray_kwargs.ray_init.num_gpus", "num_gpus=3"),
        ("cpu", {"ray_kwargs.ray_init.num_gpus": None}, "ray_kwargs.ray_init.num_gpus", "num_gpus=3"),
        ("cpu", {f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy", "fsdp2"),
    ],
)
def test_one_error_with_the_option_and_the_way_out(
    device: str, changes: dict[str, Any], option: str, in_way_out: str
) -> None:
    findings = found(device, changes)
    assert [(finding.severity, finding.option) for finding in findings] == [("error", option)]
    assert in_way_out in findings[0].way_out


@pytest.mark.parametrize(
    ("device", "machine", "severity", "option", "in_problem"),
    [
        ("cpu", replace(MACHINE, environ={}), "error", "trainer.device", "VERL_PLATFORM is not cpu"),
        ("gpu", MACHINE, "error", "trainer.device", "another device"),
        ("cpu", replace(MACHINE, cores=1), "warning", f"{RS}.slots.cpu_share", "more than the 1 cores"),
        ("gpu", replace(GPU_MACHINE, policy=MISSING), "error", "actor_rollout_ref.model.path", "no such folder"),
        ("gpu", replace(GPU_MACHINE, judge=MISSING), "error", f"{JUDGE}.model_path", "no such folder"),
        (
            "gpu",
            replace(GPU_MACHINE, judge=replace(MODEL, has_config=False)),
            "error",
            f"{JUDGE}.model_path",
            "no config.json",
        ),
        (
            "gpu",
            replace(GPU_MACHINE, policy=replace(MODEL, weight_bytes=None)),
            "error",
            "actor_rollout_ref.model.path",
            "no weights",
        ),
        (
            "gpu",
            replace(GPU_MACHINE, judge=replace(MODEL, has_safetensors=False)),
            "error",
            f"{JUDGE}.model_path",
            "no *.safetensors",
        ),
        (
            "gpu",
            replace(GPU_MACHINE, policy=replace(MODEL, is_16_bit=True), store_free_bytes=5 * GIB),
            "error",
            f"{RS}.store.directory",
            "needs 7.2 GiB",
        ),
        ("gpu", replace(GPU_MACHINE, store_free_bytes=4 * GIB), "error", f"{RS}.store.directory", "needs 4.2 GiB"),
        ("gpu", replace(GPU_MACHINE, store_filesystem="ext4"), "warning", f"{RS}.store.directory", "not in memory"),
        (
            "gpu",
            replace(GPU_MACHINE, can_draw=False),
            "warning",
            f"{RS}.observe.timeline_png",
            "matplotlib is not installed",
        ),
        (
            "gpu",
            replace(GPU_MACHINE, observe_obstacle="/x is not a folder"),
            "error",
            f"{RS}.observe.directory",
            "cannot be made: /x is not a folder",
        ),
        (
            "gpu",
            replace(GPU_MACHINE, run_folder_in_use=Path("/runs/mine")),
            "error",
            "trainer.experiment_name",
            "another run is writing to /runs/mine",
        ),
        (
            "gpu",
            replace(GPU_MACHINE, store_obstacle="/x is not a folder"),
            "error",
            f"{RS}.store.directory",
            "cannot be made: /x is not a folder",
        ),
        ("gpu", replace(GPU_MACHINE, environ={"http_proxy": "http://p"}), "warning", "no_proxy", "judge at 10.1.2.3"),
        (
            "gpu",
            replace(GPU_MACHINE, environ={"HTTP_PROXY": "http://p", "no_proxy": ".lan,127.0.0.1,10.2.0.0/16"}),
            "warning",
            "no_proxy",
            "judge at 10.1.2.3",
        ),
    ],
)
def test_findings_about_the_machine(device: str, machine: Machine, severity: str, option: str, in_problem: str) -> None:
    findings = found(device, {}, machine)
    assert [(finding.severity, finding.option) for finding in findings] == [(severity, option)]
    assert in_problem in findings[0].problem


@pytest.mark.parametrize(
    ("device", "changes", "machine"),
    [
        ("gpu", {"actor_rollout_ref.model.lora_rank": 16, "actor_rollout_ref.model.lora.merge": True}, GPU_MACHINE),
        ("gpu", {f"{JUDGE}.enable_resource_pool": False, f"{JUDGE}.nnodes": 0}, GPU_MACHINE),
        ("gpu", {}, replace(GPU_MACHINE, store_free_bytes=int(4.25 * GIB))),
        ("gpu", {}, replace(GPU_MACHINE, environ={"http_proxy": "http://p", "no_proxy": "x, 10.1.2.3"})),
        ("gpu", {}, replace(GPU_MACHINE, environ={"http_proxy": "http://p", "NO_PROXY": "10.1.0.0/16"})),
        ("gpu", {}, replace(GPU_MACHINE, environ={"http_proxy": "http://p", "no_proxy": "*"})),
        ("gpu", {}, replace(GPU_MACHINE, judge=ModelOnDisk("owner/name", False, False, False, None))),
        ("cpu", {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5}, MACHINE),
        ("cpu", {f"{RS}.train.mini_batches_per_step": 2, "data.train_batch_size": 16}, MACHINE),
        (
            "cpu",
            {"ray_kwargs.ray_init.num_gpus": None},
            replace(MACHINE, environ={"VERL_PLATFORM": "cpu", "RAY_ADDRESS": "head:6379"}),
        ),
    ],
)
def test_what_looks_doubtful_and_is_right(device: str, changes: dict[str, Any], machine: Machine) -> None:
    assert found(device, changes, machine) == []


def test_without_a_judge_there_is_one_warning() -> None:
    findings = found("gpu", {f"{JUDGE}.enable": False})
    assert [(finding.severity, finding.option) for finding in findings] == [("warning", f"{JUDGE}.enable")]


def test_the_standing_of_the_planner_that_looks_ahead_is_told() -> None:
    (finding,) = found("gpu", {f"{RS}.planner.name": "lookahead"})
    assert (finding.severity, finding.option) == ("warning", f"{RS}.planner.name")
    assert "harmonic" in finding.way_out and "simulations" in finding.problem


def test_megatron_offload_is_looked_for_in_its_own_place() -> None:
    options = {finding.option for finding in found("gpu", {f"{ACTOR}.strategy": "megatron"})}
    assert options == {f"{ACTOR}.megatron.param_offload", f"{ACTOR}.megatron.optimizer_offload"}


def test_message_lists_all_findings_errors_first() -> None:
    text = render([warning("a.b", None, "looks odd", "look"), error("c.d", 3, "is wrong", "set c.d=4")])
    assert text.splitlines() == [
        "verl-pivot refuses this configuration (1 error); nothing was started.",
        "  error: c.d=3",
        "    is wrong",
        "    -> set c.d=4",
        "  warning: a.b",
        "    looks odd",
        "    -> look",
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/dev/shm/run", "tmpfs"), ("/dev/shmx", "devtmpfs"), ("/data/a b/x", "xfs"), ("/etc", "ext4")],
)
def test_file_system_of_the_longest_mount_point_counts(path: str, kind: str) -> None:
    mounts = (
        "/dev/sda / ext4 rw 0 0\nudev /dev devtmpfs rw 0 0\nshm /dev/shm tmpfs rw 0 0\nd /data/a\\040b xfs rw 0 0\n"
    )
    assert filesystem_type(Path(path), mounts) == kind


def test_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    policy, judge = tmp_path / "policy", tmp_path / "judge"
    for folder in (policy, judge):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (policy / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (policy / "model.safetensors").write_bytes(b"x" * 100)
    (policy / "more.safetensors").write_bytes(b"x" * 50)
    (judge / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    machine = look_at_machine(
        {
            "actor_rollout_ref": {"model": {"path": str(policy)}},
            "reward": {"reward_model": {"model_path": str(judge)}},
            "trainer": {"resource_shift": {"store": {"directory": str(tmp_path / "not" / "yet")}}},
        }
    )
    assert machine.policy == ModelOnDisk(str(policy), True, True, True, 150, is_16_bit=True)
    assert machine.judge == ModelOnDisk(str(judge), True, True, True, 12345)
    assert machine.cores >= 1 and machine.environ["VERL_PLATFORM"] == "cpu"
    assert machine.store_free_bytes is not None and machine.store_free_bytes > 0
    assert (machine.observe_obstacle, machine.store_obstacle) == (None, None)
    (tmp_path / "not").touch()
    nested = {"resource_shift": {"observe": {"directory": "/proc/x"}, "store": {"directory": str(tmp_path / "not")}}}
    obstructed = look_at_machine({"trainer": nested})
    assert obstructed.observe_obstacle == "/proc is on proc, where no folder can be made"
    assert obstructed.store_obstacle == f"{tmp_path / 'not'} is not a folder"


@pytest.mark.parametrize(
    ("path", "is_local"),
    [("Qwen/Qwen3-8B", False), ("./Qwen/x", True), ("~/models/x", True), ("/abs/x", True), ("a/b/c", True)],
)
def test_hub_names_are_told_from_paths(path: str, is_local: bool) -> None:
    machine = look_at_machine({"actor_rollout_ref": {"model": {"path": path}}})
    assert machine.policy is not None
    assert (machine.policy.is_local, machine.policy.exists) == (is_local, False)
