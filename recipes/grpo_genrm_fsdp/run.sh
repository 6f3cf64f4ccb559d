#!/usr/bin/env bash
# GRPO, Qwen2.5-7B judged by Qwen3-30B-A3B, FSDP2, 8 GPUs of 80 GB on one node. README.md says what it shows.
#
#   run.sh [--print-overrides] [hydra overrides ...]
#
# --print-overrides prints what would be given to verl.trainer.main_ppo, one override a line, and starts nothing.
set -euo pipefail
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

overrides=(
    +resource_shift@_global_=pivot

    # Slots of 2 GPUs: slots 0 and 1 train (and roll out in between), slot 2 begins with rollout, slot 3 with the judge.
    trainer.nnodes=1
    trainer.n_gpus_per_node=4
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=2
    reward.reward_model.nnodes=1
    reward.reward_model.n_gpus_per_node=2
    trainer.resource_shift.slots.gpus_per_slot=2
    trainer.resource_shift.staleness=1

    # Rows need: prompt, reward_model.ground_truth, and the question as text in extra_info.question.
    "data.train_files=$HOME/data/gsm8k/train.parquet"
    "data.val_files=$HOME/data/gsm8k/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=8192
    data.filter_overlong_prompts=true
    data.truncation=error

    algorithm.adv_estimator=grpo
    # Responses may be one version old: weigh each token by how much the policy has moved since, cut off at 2.
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0

    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=false
    # Between updates the training GPUs serve rollout or judge: parameters and optimizer wait in host memory.
    actor_rollout_ref.actor.fsdp_config.param_offload=true
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true

    # Two rollout replicas in each slot.
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.75
    actor_rollout_ref.rollout.max_model_len=9216
    actor_rollout_ref.rollout.calculate_log_probs=true

    # One judge replica in each slot: 61 GB of weights on two GPUs.
    reward.reward_model.enable=true
    reward.reward_model.enable_resource_pool=true
    reward.reward_model.model_path=Qwen/Qwen3-30B-A3B
    reward.reward_model.rollout.name=vllm
    reward.reward_model.rollout.tensor_model_parallel_size=2
    reward.reward_model.rollout.gpu_memory_utilization=0.75
    reward.reward_model.rollout.enforce_eager=false
    reward.reward_model.rollout.prompt_length=12288
    reward.reward_model.rollout.response_length=4096
    reward.reward_model.rollout.max_model_len=16384
    "reward.custom_reward_function.path=$recipes/common/judge_reward.py"
    +reward.custom_reward_function.reward_kwargs.max_tokens=4096

    'trainer.logger=[console]'
    trainer.total_epochs=1
    trainer.val_before_train=false
    trainer.test_freq=-1
    trainer.save_freq=20
    trainer.project_name=verl_pivot
    trainer.experiment_name=grpo_genrm_fsdp
)

if [[ ${1:-} == --print-overrides ]]; then
    shift
    printf '%s\n' "${overrides[@]}" "$@"
    exit
fi
exec python -m verl.trainer.main_ppo "${overrides[@]}" "$@"
