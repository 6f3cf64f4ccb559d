#!/usr/bin/env bash
# GRPO with a generative reward model on four CPU slots: real verl, Ray, FSDP and vLLM. Further overrides go to verl.
#
#   [OUT=outputs/NAME] run.sh [--print-overrides] [hydra overrides ...]
#
# OUT is where the run's files go. Models and prompts are made once, in outputs/quickstart/assets.
# --print-overrides prints what would be given to verl.trainer.main_ppo, one override a line, and starts nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=${OUT:-outputs/quickstart}
assets=$PWD/outputs/quickstart/assets

overrides=(
    +resource_shift@_global_=pivot
    +pivot_platform@_global_=cpu
    trainer.n_gpus_per_node=1
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=2
    reward.reward_model.enable=true
    reward.reward_model.enable_resource_pool=true
    reward.reward_model.nnodes=1
    reward.reward_model.n_gpus_per_node=1
    "reward.reward_model.model_path=$assets/judge"
    reward.reward_model.rollout.prompt_length=512
    reward.reward_model.rollout.response_length=128
    reward.reward_model.rollout.max_model_len=640
    "reward.custom_reward_function.path=$PWD/recipes/quickstart/reward.py"
    "actor_rollout_ref.model.path=$assets/policy"
    "data.train_files=$assets/train.parquet"
    "data.val_files=$assets/val.parquet"
    data.train_batch_size=16
    data.max_prompt_length=64
    data.max_response_length=128
    algorithm.adv_estimator=grpo
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.calculate_log_probs=true
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
    actor_rollout_ref.rollout.max_model_len=256
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
    actor_rollout_ref.actor.optim.lr=5e-4
    actor_rollout_ref.actor.use_kl_loss=false
    trainer.total_training_steps=24
    trainer.val_before_train=false
    trainer.test_freq=-1
    trainer.save_freq=-1
    trainer.resume_mode=disable
    trainer.project_name=verl_pivot
    "trainer.experiment_name=$(basename "$out")"
    "trainer.default_local_dir=$out/checkpoints"
    "trainer.resource_shift.observe.directory=$(dirname "$out")"
    trainer.resource_shift.planner.cooldown_s=1
    trainer.resource_shift.planner.immunity_s=1
    trainer.resource_shift.planner.interval_s=0.25
)

if [[ ${1:-} == --print-overrides ]]; then
    shift
    printf '%s\n' "${overrides[@]}" "$@"
    exit
fi
if ! command -v python >/dev/null; then
    echo "run.sh: there is no python here: make env, then source .venv/bin/activate" >&2
    exit 1
fi
python recipes/quickstart/prepare.py --out "$assets"
export VERL_PLATFORM=cpu
exec python -m verl.trainer.main_ppo "${overrides[@]}" "$@"
