"""Every symbol of verl that this package subclasses, overrides, wraps or calls, with the parameters it was written for.

Read from verl's source, without importing it. When an entry fails, verl moved something: read the upstream change,
adapt the module that uses it, then the table.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

from verl_pivot.verl_ext.versions import VERL, installed_verl

SYMBOLS = [
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._init_resource_pool_mgr", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._setup", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_init_end", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.get_llm_client", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._rollout_server_managers", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.fit", "agent_loop_manager"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_train_begin", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_step_begin", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_sample_begin", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_sample_end", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_step_end", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer.on_validate_begin", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._submit_batch_to_rollout", "batch"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._add_async_warmup_batches", "num_warmup_batches"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._compute_old_log_prob", "batch metrics"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._compute_ref_log_prob", "batch metrics"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._compute_values", "batch metrics"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._update_critic", "batch metrics"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._update_actor", "batch metrics"),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._save_checkpoint", ""),
    ("trainer/ppo/v1/trainer_base.py", "PPOTrainer._compute_metrics", "batch metrics timing_raw global_steps epoch"),
    ("trainer/ppo/v1/trainer_base.py", "register_trainer", "name"),
    ("trainer/ppo/v1/trainer_base.py", "get_trainer_cls", "name"),
    ("utils/config.py", "validate_config", "config use_reference_policy use_critic"),
    ("utils/distributed.py", "initialize_global_process_group_ray", "timeout_second backend"),
    ("utils/fsdp_utils.py", "fsdp2_sharded_save_to_cpu", "model"),
    ("plugin/platform/platform_manager.py", "PlatformRegistry.register", "platform"),
    ("plugin/platform/platform_manager.py", "get_platform", ""),
    ("workers/engine/base.py", "EngineRegistry.register", "model_type backend device vendor"),
    ("workers/engine/base.py", "EngineRegistry.get_engine_cls", "model_type backend"),
    ("checkpoint_engine/base.py", "CheckpointEngineRegistry.register", "backend"),
    ("checkpoint_engine/base.py", "CheckpointEngineRegistry.get", "backend"),
    ("checkpoint_engine/base.py", "CheckpointEngine.send_weights", "weights global_steps"),
    ("experimental/separation/engine_workers.py", "DetachActorWorker.save_model_to_cpu", "n"),
    ("experimental/separation/engine_workers.py", "DetachActorWorker.restore_model_from_cpu", "n"),
    ("experimental/separation/engine_workers.py", "DetachActorWorker.clear_cpu_model", "n"),
    ("experimental/reward_loop/reward_loop.py", "RewardLoopManager.__init__", "config rm_resource_pool"),
    ("experimental/reward_loop/reward_loop.py", "RewardLoopManager._init_reward_loop_workers", ""),
    (
        "experimental/reward_loop/router/naive_router.py",
        "NaiveRouter.__init__",
        "worker_urls max_connections timeout max_attempts retry_delay verbose",
    ),
    (
        "workers/rollout/llm_server.py",
        "FullyAsyncLLMServerClient.generate",
        "request_id prompt_ids sampling_params image_data video_data audio_data mm_processor_kwargs **kwargs",
    ),
    ("workers/rollout/llm_server.py", "LLMServerClient._acquire_server", "request_id **extra"),
    ("workers/rollout/llm_server.py", "LLMServerClient._release_server", "server_id request_id"),
    (
        "workers/rollout/llm_server.py",
        "LLMServerManager.__init__",
        "config worker_group rollout_resource_pool start_rank load_balancer_cls",
    ),
    ("workers/rollout/llm_server.py", "LLMServerManager.get_client", "client_cls **kwargs"),
    ("workers/rollout/llm_server.py", "LLMServerManager.create_empty", "*args **kwargs"),
    ("workers/rollout/router.py", "GlobalRequestLoadBalancer.acquire_server", "request_id"),
    ("workers/rollout/router.py", "GlobalRequestLoadBalancer.release_server", "server_id request_id"),
    ("workers/rollout/router.py", "GlobalRequestLoadBalancer.add_servers", "servers"),
    ("workers/rollout/router.py", "GlobalRequestLoadBalancer.remove_servers", "server_ids"),
    ("workers/rollout/router.py", "GlobalRequestLoadBalancer.clear_sticky_cache", ""),
    (
        "workers/rollout/vllm_rollout/vllm_async_server.py",
        "vLLMHttpServer.__init__",
        "config model_config rollout_mode workers replica_rank "
        "node_rank gpus_per_node nnodes cuda_visible_devices disaggregation_role disaggregation_kv_transfer_config",
    ),
    ("workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMHttpServer._get_worker_extension_cls", ""),
    ("workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMHttpServer._preprocess_engine_kwargs", "engine_kwargs"),
    (
        "workers/rollout/vllm_rollout/vllm_async_server.py",
        "vLLMHttpServer.launch_server",
        "master_address master_port dp_rpc_port",
    ),
    (
        "workers/rollout/vllm_rollout/vllm_async_server.py",
        "vLLMHttpServer.generate",
        "prompt_ids sampling_params request_id image_data "
        "video_data audio_data mm_processor_kwargs priority kv_transfer_params",
    ),
    (
        "workers/rollout/vllm_rollout/vllm_async_server.py",
        "vLLMReplica.__init__",
        "replica_rank config model_config gpus_per_node is_reward_model is_teacher_model name_suffix",
    ),
    ("workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMReplica.launch_servers", ""),
    ("workers/rollout/replica.py", "RolloutReplica.init_colocated", "resource_pool"),
    ("workers/rollout/replica.py", "RolloutReplica.sleep", ""),
    ("workers/rollout/replica.py", "RolloutReplica.wake_up", ""),
    (
        "single_controller/ray/base.py",
        "RayWorkerGroup.__init__",
        "resource_pool ray_cls_with_init bin_pack name_prefix "
        "detached worker_names worker_handles ray_wait_register_center_timeout **kwargs",
    ),
    ("single_controller/ray/base.py", "ResourcePoolManager.create_resource_pool", ""),
    ("trainer/ppo/reward.py", "resolve_reward_manager_cls", "config"),
]
"""File below verl/, name inside it, parameters without self."""


@functools.cache
def tree(file: str) -> ast.Module:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    return ast.parse((Path(next(iter(spec.submodule_search_locations))) / file).read_text())


def find(module: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    node: ast.AST = module
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [child for child in getattr(node, "body", []) if isinstance(child, kinds) and child.name == part]
        if not found:
            return None
        node = found[-1]
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = function.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return " ".join(name for name in names if name not in ("self", "cls"))


def test_tested_release_is_the_pinned_one() -> None:
    assert installed_verl() == VERL


@pytest.mark.parametrize(("file", "name", "expected"), SYMBOLS, ids=lambda value: value if "." in value else "")
def test_symbol_is_as_expected(file: str, name: str, expected: str) -> None:
    function = find(tree(file), name)
    assert function is not None, f"verl/{file} no longer has {name}"
    assert parameters(function) == expected


def test_a_moved_symbol_would_be_noticed() -> None:
    assert find(tree("utils/config.py"), "validate_configuration") is None
    moved = ast.parse("class A:\n    async def f(self, x, *, y=1, **kw): ...\n")
    function = find(moved, "A.f")
    assert function is not None and parameters(function) == "x y **kw"
