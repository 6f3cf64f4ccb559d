"""Launches the engines of every slot. Subclasses verl/workers/rollout/llm_server.py:354 (LLMServerManager).

verl's manager owns replicas of one model on one pool. Here each slot gets replicas of the policy and of the judge, all
asleep after launch, and the control plane stands where verl has its balancer actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.actor import ActorHandle
from verl.utils.ray_utils import auto_await
from verl.workers.config import HFModelConfig
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from verl_pivot.config.layout import Layout, SlotSpec
from verl_pivot.verl_ext.client import ShiftLLMServerClient
from verl_pivot.verl_ext.control_plane import SlotDescription
from verl_pivot.verl_ext.engine_host import HostedServerClass
from verl_pivot.verl_ext.replica import ShiftReplica


class SlotServerManager(LLMServerManager):
    """Replicas of both inference roles on all slots; lives in the trainer process.

    Args:
        layout: how GPUs are cut into slots.
        anchors: one anchor a GPU, slot after slot.
        host: the node's engine host (CPU platform), or None.
        server_kwargs: keyword arguments of ``ShiftHttpServer`` beyond verl's.
    """

    def __init__(
        self,
        config: DictConfig,
        layout: Layout,
        anchors: Sequence[ActorHandle],
        control_plane: ActorHandle,
        host: ActorHandle | None,
        server_kwargs: dict[str, Any],
    ) -> None:
        self.rollout_replica_class = ShiftReplica
        super().__init__(config, worker_group=object())
        self._layout = layout
        self._anchors = list(anchors)
        self._host = host
        self._server_kwargs = server_kwargs
        self.global_load_balancer = control_plane
        self.rollout_replicas: list[ShiftReplica] = []
        self.server_handles: list[Any] = []
        self.server_addresses: list[str] = []

    @auto_await
    async def launch(self) -> list[SlotDescription]:
        """Launch every engine; within a slot one after another, so that each finds the GPUs free."""
        return list(await asyncio.gather(*[self._launch_slot(spec) for spec in self._layout.slots]))

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        return super().get_client(client_cls or ShiftLLMServerClient, **kwargs)

    async def _launch_slot(self, spec: SlotSpec) -> SlotDescription:
        can_host = ["rollout"]
        servers: dict[str, list[tuple[str, Any, str]]] = {}
        if self._layout.judge_gpus:
            can_host.append("genrm")
            servers["genrm"] = await self._launch_role(spec, judge=True)
        servers["rollout"] = await self._launch_role(spec, judge=False)
        if spec.pool == "train":
            can_host.append("train")
        return SlotDescription(spec.slot_id, spec.first_role, tuple(can_host), servers)

    async def _launch_role(self, spec: SlotSpec, judge: bool) -> list[tuple[str, Any, str]]:
        layout = self._layout
        gpus = layout.judge_gpus if judge else layout.rollout_gpus
        per_slot = layout.judge_replicas_per_slot if judge else layout.rollout_replicas_per_slot
        first_gpu = spec.slot_id * layout.gpus_per_slot
        servers = []
        for index in range(per_slot):
            replica = self._replica(spec.slot_id * per_slot + index, judge, gpus)
            start = first_gpu + index * gpus
            await replica.init_on_slot(self._anchors[start : start + gpus])
            name = f"{'judge' if judge else 'rollout'}_{replica.replica_rank}"
            servers.append((name, replica.server_handle, f"http://{replica.server_address}"))
        return servers

    def _replica(self, rank: int, judge: bool, gpus: int) -> ShiftReplica:
        judge_config = self.config.reward.reward_model
        replica = ShiftReplica(
            replica_rank=rank,
            config=_weights_from_store(judge_config.rollout if judge else self.rollout_config),
            model_config=HFModelConfig(path=judge_config.model_path) if judge else self.model_config,
            gpus_per_node=gpus,
            is_reward_model=judge,
            server_class=HostedServerClass(self._host, self._server_kwargs),
        )
        if not judge:
            self.rollout_replicas.append(replica)
        return replica


class NoServerManager(LLMServerManager):
    """Stands for the servers that verl's own set-up would launch on training GPUs, of which there are none here.

    verl's ``create_empty`` (verl/workers/rollout/llm_server.py:409) refuses ``rollout.nnodes=0``, which is a layout
    without a rollout pool, and starts a balancer that nobody asks.
    """

    @classmethod
    def create_empty(cls, config: DictConfig) -> LLMServerManager:
        manager = cls(config, worker_group=object())
        manager.rollout_replicas, manager.server_handles, manager.server_addresses = [], [], []
        return manager


def _weights_from_store(rollout: DictConfig) -> DictConfig:
    """The rollout config with ``load_format=dummy``: real weights come from the parameter store at the first wake."""
    copy = OmegaConf.create(OmegaConf.to_container(rollout, resolve=True))
    with open_dict(copy):
        copy.load_format = "dummy"
    return copy


def release_anchors(anchors: Sequence[ActorHandle]) -> None:
    """Anchors have told where the GPUs are; their processes can go."""
    for anchor in anchors:
        ray.kill(anchor)
