"""The deployments that are compared, as overrides of verl's configuration. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.deployments import shm_backend
from benchmarks.deployments.workload import JUDGE_TEMPLATE_TOKENS, MAX_PROMPT_TOKENS, Assets, Workload

SLOTS = 4
HERE = Path(__file__).resolve().parent
UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
Kind = Literal["colocated", "disaggregated", "enable_switch", "resource_shift"]
Planner = Literal["harmonic", "lookahead"]


@dataclass(frozen=True)
class Variant:
    """One way to use the four slots."""

    kind: Kind
    train: int
    rollout: int = 0
    judge: int = 0
    hybrid: bool = True
    """separate_async only: rollout engines on the training slots as well (verl's default)."""
    staleness: int = 0
    """resource_shift only; see ``STALENESS_NOTE`` for the others."""
    planner: Planner = "harmonic"
    """resource_shift only."""

    @property
    def family(self) -> str:
        """What the variant is one split of."""
        if self.kind != "resource_shift":
            return f"verl_{self.kind}"
        planner = "" if self.planner == "harmonic" else f"_{self.planner}"
        return f"resource_shift{planner}_staleness{self.staleness}"

    @property
    def name(self) -> str:
        if self.kind == "colocated":
            return "verl_colocated"
        if self.kind == "resource_shift":
            return f"{self.family}_train{self.train}"
        split = f"train{self.train}_rollout{self.rollout}_judge{self.judge}"
        suffix = "" if self.hybrid else "_nohybrid"
        return f"verl_{self.kind}_{split}{suffix}"

    @property
    def compute_processes(self) -> dict[str, int]:
        """Processes that compute on slots, by role, once a run of verl's own deployments is up."""
        if self.kind == "colocated":
            return {"train": SLOTS, "rollout": SLOTS, "genrm": SLOTS}
        return {"train": self.train, "rollout": self.rollout + self.train * self.hybrid, "genrm": self.judge}


STALENESS_NOTE = {
    "colocated": "0: synchronous, on-policy",
    "disaggregated": "1: num_warmup_batches=1 keeps one batch of prompts ahead and weights are published once a step "
    "(parameter_sync_step mini-batches), so a prompt is trained on about one version after it was submitted; "
    "stragglers may lag further, up to max_off_policy_threshold=8 versions, beyond which they are dropped",
    "resource_shift": "as in its name: prompts for that many steps are kept ahead; a straggler is waited for, never "
    "dropped, so none lags further",
}
STALENESS_NOTE["enable_switch"] = STALENESS_NOTE["disaggregated"]

SPLITS = (
    Variant("disaggregated", train=1, rollout=2, judge=1),
    Variant("disaggregated", train=1, rollout=1, judge=2),
    Variant("disaggregated", train=2, rollout=1, judge=1),
    Variant("disaggregated", train=1, rollout=2, judge=1, hybrid=False),
)
"""The splits of four slots that can be expected to do well; the best one counts."""


def resource_shift(staleness: int, train: int, planner: Planner = "harmonic") -> Variant:
    """Slots outside the training pool begin with one judge and move from there. With all slots in the training pool
    there is no other."""
    judge = min(1, SLOTS - train)
    rollout = SLOTS - train - judge
    return Variant("resource_shift", train, rollout, judge, staleness=staleness, planner=planner)


def switching(deployments: Mapping[str, Mapping[str, Any]]) -> Variant:
    """``enable_switch`` on the measured split that did best among those with rollout engines on training slots."""
    measured = [split for split in SPLITS if split.hybrid and split.name in deployments]
    split = max(measured, key=lambda split: deployments[split.name]["equal_speed_tokens_per_s"], default=SPLITS[0])
    return Variant("enable_switch", split.train, split.rollout, split.judge)


def overrides(variant: Variant, workload: Workload, assets: Assets, run: Path, steps: int, share: float) -> list[str]:
    """Arguments of ``python -m verl.trainer.main_ppo``.

    Args:
        run: the run's directory.
        steps: training steps in all, warm-up included.
        share: cores of one slot.
    """
    common = [*_common(workload, assets, run, steps), *_engines(workload, ours=variant.kind == "resource_shift")]
    return [*common, *_KINDS[variant.kind](variant, workload, run, share)]


def _common(workload: Workload, assets: Assets, run: Path, steps: int) -> list[str]:
    actor, rollout, judge = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward.reward_model"
    response, judgement = workload.rollout.max_tokens, workload.judge.max_tokens
    judge_prompt = response + JUDGE_TEMPLATE_TOKENS
    reward = {"model": str(assets.judge), "lengths": asdict(workload.judge)}
    return [
        "+pivot_platform@_global_=cpu",
        f"ray_kwargs.ray_init.num_gpus={SLOTS}",
        f"data.train_files={assets.train_file}",
        f"data.val_files={assets.val_file}",
        "data.shuffle=false",
        f"data.train_batch_size={workload.prompts_per_step}",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        f"data.max_response_length={response}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={assets.policy}",
        "actor_rollout_ref.model.external_lib=benchmarks.deployments.announce",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{actor}.ppo_mini_batch_size={workload.mini_batch_prompts}",
        f"{actor}.ppo_micro_batch_size_per_gpu={workload.micro_batch}",
        f"{actor}.use_kl_loss=false",
        f"{actor}.optim.lr=1e-6",
        f"{rollout}.n={workload.responses_per_prompt}",
        f"{rollout}.max_model_len={MAX_PROMPT_TOKENS + response}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={workload.micro_batch}",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.agent.agent_loop_config_path={assets.agent_config}",
        f"{rollout}.agent.default_agent_loop=budget_agent",
        f"{judge}.enable=true",
        f"{judge}.model_path={assets.judge}",
        f"{judge}.rollout.prompt_length={judge_prompt}",
        f"{judge}.rollout.response_length={judgement}",
        f"{judge}.rollout.max_model_len={judge_prompt + judgement}",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=PromptRewardManager",
        f"reward.reward_manager.module.path={HERE / 'judge_reward.py'}",
        f"reward.custom_reward_function.path={HERE / 'judge_reward.py'}",
        f"+reward.custom_reward_function.reward_kwargs={_hydra(reward)}",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.experiment_name={run.name}",
        f"trainer.default_local_dir={run / 'checkpoints'}",
    ]


def _engines(workload: Workload, ours: bool) -> list[str]:
    """Engines alike: KV pool, batch limit, and one process an engine (verl alone would take two, which cost more)."""
    options = []
    for engine in ("actor_rollout_ref.rollout", "reward.reward_model.rollout"):
        options.append(f"{engine}.max_num_seqs={workload.max_num_seqs}")
        if not ours:
            options.append(f"{engine}.engine_kwargs.vllm.kv_cache_memory_bytes={workload.kv_cache_bytes}")
            options.append(f"+{engine}.engine_kwargs.vllm.distributed_executor_backend={UNIPROC_EXECUTOR}")
    return options


def _colocated(variant: Variant, workload: Workload, run: Path, share: float) -> list[str]:
    return [
        "trainer.v1.trainer_mode=sync",
        f"trainer.n_gpus_per_node={variant.train}",
        "reward.reward_model.enable_resource_pool=false",
        f"reward.reward_model.n_gpus_per_node={variant.train}",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        *_sampler("FastReplayBuffer"),
    ]


def _separate_async(variant: Variant, workload: Workload, run: Path, share: float) -> list[str]:
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    mode = "trainer.v1.separate_async"
    return [
        "trainer.v1.trainer_mode=separate_async",
        f"{mode}.parameter_sync_step={workload.mini_batches_per_step}",
        f"{mode}.hybrid_rollout.enable_switch={str(variant.kind == 'enable_switch').lower()}",
        f"actor_rollout_ref.hybrid_engine={str(variant.hybrid).lower()}",
        *_pools(variant),
        f"{engine}.backend={shm_backend.NAME}",
        f"{engine}.custom_backend_module=benchmarks.deployments.shm_weights",
        f"{engine}.update_weights_bucket_megabytes=64",
        f"+{engine}.engine_kwargs.{shm_backend.NAME}.directory={shm_backend.directory(run)}",
        *_sampler("FastReplayBufferAsync"),
    ]


def _resource_shift(variant: Variant, workload: Workload, run: Path, share: float) -> list[str]:
    node = "trainer.resource_shift"
    # A training pool of all slots would stop generation for every mini-batch.
    per_step = workload.mini_batches_per_step if variant.train < SLOTS else 1
    return [
        "+resource_shift@_global_=pivot",
        *_pools(variant),
        f"{node}.staleness={variant.staleness}",
        f"{node}.train.mini_batches_per_step={per_step}",
        f"{node}.slots.cpu_share={share}",
        f"{node}.engine.kv_cache_bytes={workload.kv_cache_bytes}",
        f"{node}.planner.name={variant.planner}",
        f"{node}.planner.interval_s=0.25",
        f"{node}.planner.cooldown_s=1",
        f"{node}.planner.immunity_s=1",
        f"{node}.observe.directory={run / 'observe'}",
    ]


def _pools(variant: Variant) -> list[str]:
    rollout, judge = int(variant.rollout > 0), variant.judge > 0
    return [
        f"trainer.n_gpus_per_node={variant.train}",
        f"actor_rollout_ref.rollout.nnodes={rollout}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={variant.rollout}",
        f"reward.reward_model.enable_resource_pool={str(judge).lower()}",
        f"reward.reward_model.nnodes={int(judge)}",
        f"reward.reward_model.n_gpus_per_node={variant.judge}",
    ]


def _sampler(name: str) -> list[str]:
    option = "trainer.v1.sampler.custom_sampler"
    return [f"{option}.path={HERE / 'fast_polling.py'}", f"{option}.name={name}"]


_KINDS = {
    "colocated": _colocated,
    "disaggregated": _separate_async,
    "enable_switch": _separate_async,
    "resource_shift": _resource_shift,
}


def _hydra(value: object) -> str:
    """A mapping in hydra's override grammar: keys without quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(child)}" for key, child in value.items()) + "}"
    return json.dumps(value)
