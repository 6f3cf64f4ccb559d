"""The parameter store as a verl checkpoint-engine backend, ``pivot_store``.

verl's own backends need every replica to take part in one group at once; here the trainer publishes once and each
engine loads when it wakes or is told. Registered when verl imports ``verl.checkpoint_engine.base`` (config key
``rollout.checkpoint_engine.custom_backend_module``).

Who calls what: ``send_weights`` runs in every actor worker (verl/workers/engine_workers.py, ``update_weights``), since
gathering a full tensor is a collective; only the master writes. ``receive_weights`` is never part of our path: engines
read the store themselves.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_pivot.config.completion import BACKEND
from verl_pivot.config.schema import StoreConfig
from verl_pivot.store import ParameterStore


@CheckpointEngineRegistry.register(BACKEND)
class ParameterStoreCheckpointEngine(CheckpointEngine):
    """Publishes the policy's weights into the run's parameter store.

    Args:
        bucket_size: verl's transfer bucket in bytes; not used, shards follow ``store.shard_bytes``.
        is_master: True on global rank 0 of the actor group, the one that writes.
        run_dir: folder of this run inside the store, made by its owner (the trainer process).
        hf_dir: local Hugging Face directory of the policy, source of config and tokenizer files.
        store: fields of ``trainer.resource_shift.store``.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        run_dir: str | None = None,
        hf_dir: str | None = None,
        store: dict[str, Any] | None = None,
    ) -> None:
        del bucket_size
        if run_dir is None:
            raise ValueError(
                f"checkpoint_engine.backend={BACKEND!r} works with trainer.v1.trainer_mode=resource_shift only, which "
                "gives it the run's folder; use another backend or switch resource_shift on"
            )
        self._is_master = is_master
        self._run_dir = run_dir
        self._hf_dir = hf_dir
        self._config = StoreConfig(**(store or {}))
        self._store: ParameterStore | None = None

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> dict[str, float]:
        """Publish ``weights`` as policy version ``global_steps``.

        Returns:
            ``{"publish_s", "publish_bytes"}`` on the master, ``{}`` elsewhere.

        Raises:
            StoreFull: after the other ranks' share of the gather was completed, so that none of them hangs.
        """
        if global_steps is None:
            raise ValueError("send_weights needs global_steps: it is the policy version to publish")
        if not self._is_master:
            for _ in weights:
                pass
            return {}
        stream = iter(weights)
        start_s = time.perf_counter()
        try:
            if self._store is None:
                self._store = ParameterStore.attach(self._run_dir, self._config)
            manifest = self._store.publish("policy", global_steps, stream, hf_dir=self._hf_dir)
        except BaseException:
            for _ in stream:  # every rank must see the whole gather, or the others wait for ever
                pass
            raise
        return {"publish_s": time.perf_counter() - start_s, "publish_bytes": float(manifest.total_bytes)}

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        raise NotImplementedError(f"{BACKEND!r} has no process group: engines read the store on their own")

    def init_process_group(self, **kwargs: Any) -> None:
        raise NotImplementedError(f"{BACKEND!r} has no process group: engines read the store on their own")

    def finalize(self) -> None:
        return None

    async def receive_weights(self, global_steps: int | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        raise NotImplementedError(f"{BACKEND!r}: engines read the store on their own (load_version)")
