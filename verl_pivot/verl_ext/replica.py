"""verl's vLLM replica on a slot: same launch, but it holds no worker processes of its own.

verl keeps one CheckpointEngineWorker a GPU beside each colocated replica to receive weights
(verl/workers/rollout/replica.py, ``init_colocated``). Our engines read the parameter store themselves, so light
*anchors* tell where a slot's GPUs are and go away after launch.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray import RayResourcePool
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_pivot.verl_ext.anchor import SlotAnchor
from verl_pivot.verl_ext.engine_host import HostedServerClass


def place_anchors(pool: RayResourcePool, device_name: str) -> list[ActorHandle]:
    """One anchor for each GPU of ``pool``, in the pool's rank order (node after node)."""
    anchor_cls = ray.remote(SlotAnchor)
    anchors = []
    for group in pool.get_placement_groups(device_name=device_name):
        for bundle in range(group.bundle_count):
            anchors.append(
                anchor_cls.options(
                    num_cpus=0,
                    num_gpus=0.05,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=bundle
                    ),
                ).remote()
            )
    return anchors


class ShiftReplica(vLLMReplica):
    """A replica of one role on (a part of) one slot."""

    def __init__(self, *args: Any, server_class: HostedServerClass, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = server_class

    async def init_on_slot(self, anchors: list[ActorHandle]) -> None:
        """Launch on the GPUs of ``anchors``; the engine ends up asleep."""
        self.rollout_mode = RolloutMode.COLOCATED
        self.workers = anchors
        await self.launch_servers()
        self.workers = []

    async def sleep(self) -> None:
        await asyncio.gather(*[server.sleep_engine.remote() for server in self.servers])

    async def wake_up(self) -> None:
        raise RuntimeError("a replica on a slot wakes in a shift transaction only, never on its own")
