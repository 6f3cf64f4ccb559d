"""verl's reward loop over judges on slots.

verl's manager launches judge replicas of its own and, for a colocated judge, computes rewards only after sampling
(verl/experimental/reward_loop/reward_loop.py:320). Here judges are engines on slots behind ``JudgeRouter``, so rewards
always stream with rollout, and a colocated judge needs no refusal in asynchronous mode.
"""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig
from ray.actor import ActorHandle
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.trainer.ppo.reward import resolve_reward_manager_cls


class ShiftRewardLoopManager(RewardLoopManager):
    """Reward workers that post to the given router address; runs in the trainer process."""

    trainer: Any = None
    """Set before verl constructs the manager: by then the trainer's deployment has a router address."""

    def __init__(self, config: DictConfig, rm_resource_pool: Any = None) -> None:
        del rm_resource_pool  # judges live on slots
        self.config = config
        self.reward_model_manager = None
        self.reward_router_address = type(self).trainer.deployment.router_address()
        self.reward_loop_workers_class = ray.remote(RewardLoopWorker)
        self.reward_manager_cls = resolve_reward_manager_cls(config)
        self._init_reward_loop_workers()

    @property
    def reward_loop_worker_handles(self) -> list[ActorHandle]:
        return self.reward_loop_workers
