"""What this package touches of verl: the tables of test_contract_verl.py. Files are below ``verl/``."""

from __future__ import annotations

_CHECKPOINT_ENGINE = "checkpoint_engine/base.py"
_REWARD_LOOP = "experimental/reward_loop/reward_loop.py"
_DETACH_WORKER = "experimental/separation/engine_workers.py"
_PLATFORM = "plugin/platform/platform_base.py"
_RAY = "single_controller/ray/base.py"
_REPLAY = "trainer/ppo/v1/replay_buffer.py"
_TRAINER = "trainer/ppo/v1/trainer_base.py"
_ENGINES = "workers/engine/fsdp/transformer_impl.py"
_LLM_SERVER = "workers/rollout/llm_server.py"
_REPLICA = "workers/rollout/replica.py"
_ROUTER = "workers/rollout/router.py"
_VLLM_SERVER = "workers/rollout/vllm_rollout/vllm_async_server.py"

_GENERATE = "request_id prompt_ids sampling_params image_data video_data audio_data mm_processor_kwargs **kwargs"

FUNCTIONS = [
    (_CHECKPOINT_ENGINE, "CheckpointEngineRegistry.register", "backend"),
    (_CHECKPOINT_ENGINE, "CheckpointEngine.prepare", ""),
    (_CHECKPOINT_ENGINE, "CheckpointEngine.build_topology", "actor_wg_world_size rollout_world_size metadata"),
    (_CHECKPOINT_ENGINE, "CheckpointEngine.init_process_group", "**kwargs"),
    (_CHECKPOINT_ENGINE, "CheckpointEngine.send_weights", "weights global_steps"),
    (_CHECKPOINT_ENGINE, "CheckpointEngine.receive_weights", "global_steps"),
    (_CHECKPOINT_ENGINE, "CheckpointEngine.finalize", ""),
    (_REWARD_LOOP, "RewardLoopWorker.__init__", "config reward_router_address"),
    (_REWARD_LOOP, "RewardLoopManager.__init__", "config rm_resource_pool"),
    (_REWARD_LOOP, "RewardLoopManager._init_reward_loop_workers", ""),
    (_REWARD_LOOP, "RewardLoopManager.reward_loop_worker_handles", ""),
    (
        "experimental/reward_loop/router/naive_router.py",
        "NaiveRouter.__init__",
        "worker_urls max_connections timeout max_attempts retry_delay verbose",
    ),
    ("experimental/reward_loop/router/naive_router.py", "NaiveRouter._make_async_request", "request endpoint"),
    (_DETACH_WORKER, "DetachActorWorker._get_strategy_handlers", ""),
    (_DETACH_WORKER, "DetachActorWorker.save_model_to_cpu", "n"),
    (_DETACH_WORKER, "DetachActorWorker.restore_model_from_cpu", "n"),
    (_DETACH_WORKER, "DetachActorWorker.clear_cpu_model", "n"),
    (_PLATFORM, "PlatformBase.is_platform_available", "use_smi_check"),
    (_PLATFORM, "PlatformBase.set_device", "device_index"),
    (_PLATFORM, "PlatformBase.synchronize", "device_index"),
    (_PLATFORM, "PlatformBase.manual_seed", "seed"),
    (_PLATFORM, "PlatformBase.manual_seed_all", "seed"),
    (_PLATFORM, "PlatformBase.set_allocator_settings", "settings"),
    (_PLATFORM, "PlatformBase.get_device_capability", "device_index"),
    (_PLATFORM, "PlatformBase.nvtx_range", "msg"),
    ("plugin/platform/platform_manager.py", "PlatformRegistry.register", "platform"),
    (_RAY, "RayResourcePool.get_placement_groups", "strategy name device_name"),
    ("trainer/ppo/reward.py", "resolve_reward_manager_cls", "config"),
    (_REPLAY, "ReplayBuffer._wait_for_next_poll", "partition_id last_debug_time"),
    (_REPLAY, "ReplayBufferAsync.get_sampleable_count", "global_steps partition_id"),
    (_TRAINER, "register_trainer", "name"),
    (_TRAINER, "_count_tq_prompt_groups", "partition_id"),
    (_TRAINER, "PPOTrainer.__init__", "config"),
    (_TRAINER, "PPOTrainer._init_resource_pool_mgr", ""),
    (_TRAINER, "PPOTrainer._setup", ""),
    (_TRAINER, "PPOTrainer.on_init_end", ""),
    (_TRAINER, "PPOTrainer.get_llm_client", ""),
    (_TRAINER, "PPOTrainer._rollout_server_managers", ""),
    (_TRAINER, "PPOTrainer.fit", "agent_loop_manager"),
    (_TRAINER, "PPOTrainer.on_train_begin", ""),
    (_TRAINER, "PPOTrainer.on_step_begin", ""),
    (_TRAINER, "PPOTrainer.on_sample_begin", ""),
    (_TRAINER, "PPOTrainer.on_sample_end", ""),
    (_TRAINER, "PPOTrainer.on_step_end", ""),
    (_TRAINER, "PPOTrainer.on_validate_begin", ""),
    (_TRAINER, "PPOTrainer._add_prompts_to_generate", "num_prompts"),
    (_TRAINER, "PPOTrainer._submit_batch_to_rollout", "batch"),
    (_TRAINER, "PPOTrainer._add_async_warmup_batches", "num_warmup_batches"),
    (_TRAINER, "PPOTrainer._compute_old_log_prob", "batch metrics"),
    (_TRAINER, "PPOTrainer._compute_ref_log_prob", "batch metrics"),
    (_TRAINER, "PPOTrainer._compute_values", "batch metrics"),
    (_TRAINER, "PPOTrainer._update_critic", "batch metrics"),
    (_TRAINER, "PPOTrainer._update_actor", "batch metrics"),
    (_TRAINER, "PPOTrainer._save_checkpoint", ""),
    (_TRAINER, "PPOTrainer._compute_metrics", "batch metrics timing_raw global_steps epoch"),
    ("trainer/ppo/v1/trainer_separate_async.py", "PPOTrainerSeparateAsync._compute_old_log_prob", "batch metrics"),
    ("utils/config.py", "validate_config", "config use_reference_policy use_critic"),
    ("utils/device.py", "get_device_name", ""),
    ("utils/device.py", "get_torch_device", ""),
    ("utils/distributed.py", "initialize_global_process_group_ray", "timeout_second backend"),
    ("utils/fs.py", "copy_to_local", "src cache_dir filelock verbose always_recopy use_shm"),
    ("utils/fsdp_utils.py", "fsdp2_sharded_save_to_cpu", "model"),
    ("utils/model.py", "load_valuehead_model", "local_path torch_dtype model_config trust_remote_code"),
    ("utils/profiler/nvtx_profile.py", "marked_timer", "name timing_raw color domain category"),
    ("utils/profiler/performance.py", "marked_timer", "name timing_raw color domain category"),
    ("utils/ray_utils.py", "auto_await", "func"),
    ("utils/tokenizer/tokenizer.py", "normalize_token_ids", "tokenized_output"),
    ("workers/engine/base.py", "EngineRegistry.register", "model_type backend device vendor"),
    ("workers/engine_workers.py", "ActorRolloutRefWorker.update_weights", "global_steps mode"),
    (_LLM_SERVER, "LLMServerClient.generate", _GENERATE),
    (_LLM_SERVER, "LLMServerClient._acquire_server", "request_id **extra"),
    (_LLM_SERVER, "FullyAsyncLLMServerClient.__init__", "config load_balancer_handle only_hybrid **kwargs"),
    (_LLM_SERVER, "FullyAsyncLLMServerClient._acquire_server", "request_id **extra"),
    (_LLM_SERVER, "FullyAsyncLLMServerClient.generate", _GENERATE),
    (_LLM_SERVER, "FullyAsyncLLMServerClient._configured_response_length", ""),
    (
        _LLM_SERVER,
        "LLMServerManager.__init__",
        "config worker_group rollout_resource_pool start_rank load_balancer_cls",
    ),
    (_LLM_SERVER, "LLMServerManager.get_client", "client_cls **kwargs"),
    (_LLM_SERVER, "LLMServerManager.create_empty", "*args **kwargs"),
    (_REPLICA, "RolloutReplica.wake_up", ""),
    (_ROUTER, "GlobalRequestLoadBalancer.__init__", "servers max_cache_size full_determinism"),
    (_ROUTER, "GlobalRequestLoadBalancer.acquire_server", "request_id"),
    (_ROUTER, "GlobalRequestLoadBalancer.release_server", "server_id request_id"),
    (_ROUTER, "GlobalRequestLoadBalancer.require_acquire_fields", ""),
    (_ROUTER, "GlobalRequestLoadBalancer.require_release_fields", ""),
    (_ROUTER, "GlobalRequestLoadBalancer.get_all_servers", ""),
    (_ROUTER, "GlobalRequestLoadBalancer.get_inflight_count", "server_id"),
    (_ROUTER, "GlobalRequestLoadBalancer.get_total_inflight", ""),
    (_ROUTER, "GlobalRequestLoadBalancer.get_status", ""),
    (_ROUTER, "GlobalRequestLoadBalancer.clear_sticky_cache", ""),
    ("workers/rollout/utils.py", "run_uvicorn", "app server_args server_address"),
    (
        _VLLM_SERVER,
        "vLLMHttpServer.__init__",
        "config model_config rollout_mode workers replica_rank "
        "node_rank gpus_per_node nnodes cuda_visible_devices disaggregation_role disaggregation_kv_transfer_config",
    ),
    (_VLLM_SERVER, "vLLMHttpServer._get_worker_extension_cls", ""),
    (_VLLM_SERVER, "vLLMHttpServer._preprocess_engine_kwargs", "engine_kwargs"),
    (_VLLM_SERVER, "vLLMHttpServer.launch_server", "master_address master_port dp_rpc_port"),
    (_VLLM_SERVER, "vLLMHttpServer.get_server_address", ""),
    (
        _VLLM_SERVER,
        "vLLMHttpServer.generate",
        "prompt_ids sampling_params request_id image_data "
        "video_data audio_data mm_processor_kwargs priority kv_transfer_params",
    ),
    (_VLLM_SERVER, "vLLMHttpServer.abort_all_requests", "reset_prefix_cache reject_request"),
    (_VLLM_SERVER, "vLLMHttpServer.resume_generation", ""),
    (
        _VLLM_SERVER,
        "vLLMReplica.__init__",
        "replica_rank config model_config gpus_per_node is_reward_model is_teacher_model name_suffix",
    ),
    (_VLLM_SERVER, "vLLMReplica.launch_servers", ""),
    (_VLLM_SERVER, "vLLMReplica.sleep", ""),
]
"""File, name inside it, parameters without self."""

CLASSES = [
    ("experimental/agent_loop/agent_loop.py", "AgentLoopManager", ""),
    (
        _REWARD_LOOP,
        "RewardLoopManager",
        "config reward_loop_workers reward_loop_workers_class "
        "reward_manager_cls reward_model_manager reward_router_address",
    ),
    ("experimental/reward_loop/router/naive_router.py", "NaiveRouter", "app client"),
    (_DETACH_WORKER, "DetachActorWorker", "_strategy_handlers"),
    (
        _PLATFORM,
        "PlatformBase",
        "device_name vendor_name device_module is_available current_device device_count empty_cache "
        "communication_backend_name visible_devices_envvar ray_resource_name ray_noset_envvars "
        "profiler_start profiler_stop is_ipc_supported cudart",
    ),
    (_RAY, "RayWorkerGroup", "workers"),
    (_RAY, "ResourcePoolManager", "resource_pool_spec mapping resource_pool_dict"),
    ("trainer/ppo/utils.py", "Role", "Actor RewardModel"),
    (_REPLAY, "ReplayBuffer", "poll_interval refill_fn finished_keys"),
    (
        _TRAINER,
        "PPOTrainer",
        "config replay_buffer resource_pool_manager role_worker_mapping actor_rollout_wg global_steps timing_raw "
        "parameter_sync_step local_trigger_step total_training_steps "
        "_restored_tq_prompt_count _pending_sync_metrics _enable_hybrid_replicas",
    ),
    (_TRAINER, "", "TRAINER_REGISTRY RewardLoopManager LLMServerManager"),
    ("trainer/ppo/v1/__init__.py", "", "PPOTrainer register_trainer"),
    ("workers/config/model.py", "HFModelConfig", "path"),
    ("workers/engine/base.py", "EngineRegistry", "_engines"),
    (_ENGINES, "FSDPEngineWithLMHead", ""),
    (_ENGINES, "FSDPEngineWithValueHead", ""),
    ("workers/engine_workers.py", "ActorRolloutRefWorker", "config"),
    (_LLM_SERVER, "LLMServerClient", "_load_balancer"),
    (
        _LLM_SERVER,
        "LLMServerManager",
        "config rollout_config model_config rollout_replica_class "
        "global_load_balancer rollout_replicas server_handles server_addresses",
    ),
    (_REPLICA, "RolloutMode", "COLOCATED"),
    (_REPLICA, "RolloutReplica", "replica_rank rollout_mode workers servers server_handle server_address"),
    (_REPLICA, "TokenOutput", "token_ids log_probs num_preempted routed_experts stop_reason extra_fields"),
    (_ROUTER, "GlobalRequestLoadBalancer", "_request_id_to_server"),
    ("workers/rollout/vllm_rollout/utils.py", "vLLMColocateWorkerExtension", ""),
    (_VLLM_SERVER, "vLLMHttpServer", "config engine node_rank global_steps _server_task"),
    (_VLLM_SERVER, "vLLMReplica", "server_class"),
]
"""File, class (or "" for the module itself), names that it must have; none where the class alone is used."""

FRAGMENTS = [
    (_REWARD_LOOP, "RewardLoopManager._init_reward_loop_workers", ".remote(self.config, self.reward_router_address)"),
    ("experimental/reward_loop/router/naive_router.py", "NaiveRouter.__init__", ")(self._make_async_request)"),
    (_DETACH_WORKER, "DetachActorWorker.copy_handler", "self._get_strategy_handlers()[0]"),
    ("trainer/ppo/v1/agent_loop_tq.py", "AgentLoopWorkerTQ._agent_loop_postprocess", '"response_len": response_len,'),
    (_REPLAY, "ReplayBufferAsync.wait_for_sampleable", "self._wait_for_next_poll(partition_id, last_debug_time)"),
    (_REPLAY, "ReplayBufferAsync.wait_for_sampleable", "self.refill_fn(len(evicted_uids))"),
    (_TRAINER, "PPOTrainer._build_replay_buffer", 'ReplayBuffer if self.trainer_mode == "sync" else ReplayBufferAsync'),
    (_TRAINER, "PPOTrainer._init_resource_pool_mgr", 'global_pool_id = "global_pool"'),
    (_TRAINER, "PPOTrainer._init_resource_pool_mgr", 'resource_pool_spec["reward_pool"] = reward_pool'),
    (_TRAINER, "PPOTrainer._setup", "LLMServerManager.create_empty(config=self.config)"),
    (_TRAINER, "PPOTrainer.step", 'tag.get("is_padding", False)'),
    ("trainer/ppo/reward.py", "resolve_reward_manager_cls", "object_name=reward_manager_cfg.name"),
    (
        "trainer/ppo/reward.py",
        "get_custom_reward_fn",
        "load_extern_object(module_path=module_path, object_name=fn_name)",
    ),
    ("utils/import_utils.py", "load_module", "if not os.path.exists(module_path)"),
    ("utils/debug/metrics.py", "calculate_debug_metrics", '"training/rollout_probs_diff_max"'),
    ("workers/engine_workers.py", "ActorRolloutRefWorker.init_model", "is_master=(torch.distributed.get_rank() == 0)"),
    ("workers/engine_workers.py", "ActorRolloutRefWorker.init_model", "bucket_size=bucket_size, **engine_kwargs"),
    (_LLM_SERVER, "LLMServerClient.generate", "request_id=self._vllm_request_id(request_id)"),
    (_LLM_SERVER, "LLMServerClient._acquire_server", "{name: extra[name] for name in self._lb_require_acquire_fields"),
    (_LLM_SERVER, "LLMServerManager.__init__", 'if not hasattr(self, "rollout_replica_class")'),
    (_VLLM_SERVER, "vLLMHttpServer.abort_all_requests", '"aborted_count": len(request_ids)'),
    (_VLLM_SERVER, "vLLMReplica.launch_servers", "self.server_class.options("),
    (_VLLM_SERVER, "vLLMReplica.launch_servers", "name=name,"),
]
"""File, function, a piece of its text that ours stands on: how it calls us, or the key under which something is."""
