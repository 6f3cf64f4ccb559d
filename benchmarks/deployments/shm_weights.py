"""A verl checkpoint engine for ``separate_async`` on the CPU: weights go through one file in shared memory.

verl's own engines (nccl, nixl, mooncake, ...) need an accelerator or RDMA; ``separate_async`` refuses the naive one.
Loaded through ``rollout.checkpoint_engine.custom_backend_module``. The master writes, every replica's worker reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from benchmarks.deployments import shm_backend

BACKEND = shm_backend.NAME
_POLL_S = 0.005


@CheckpointEngineRegistry.register(BACKEND)
class SharedMemoryCheckpointEngine(CheckpointEngine):
    """One file for each weight update, numbered by the updates so far, in which every worker takes part."""

    def __init__(self, bucket_size: int, is_master: bool = False, directory: str = "/dev/shm") -> None:
        del bucket_size
        self._is_master = is_master
        self._directory = Path(directory)
        self._update = 0

    def prepare(self) -> dict[str, Any]:
        self._update += 1
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        return None

    def finalize(self) -> None:
        if self._is_master:
            self._file().unlink(missing_ok=True)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
        if self._is_master:
            self._directory.mkdir(parents=True, exist_ok=True)
            unfinished = self._file().with_suffix(".part")
            save_file(tensors, unfinished)
            unfinished.rename(self._file())

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while not self._file().exists():
            await asyncio.sleep(_POLL_S)
        with safe_open(self._file(), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                yield name, file.get_tensor(name)

    def _file(self) -> Path:
        return self._directory / f"update{self._update}.safetensors"
