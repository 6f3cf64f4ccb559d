"""Versioned weight loading on a GPU worker, by vLLM's in-place reload.

``Worker.reload_weights`` (vllm/v1/worker/gpu_worker.py:470, since 0.24) loads layer by layer into the existing storage,
so CUDA graphs and the KV pool stay valid. Runs in every worker process of an engine; with tensor parallelism each rank
reads its own shard.
"""

from __future__ import annotations

from typing import Any

from verl_pivot.vllm_ext import checkpoint

_VERSION = "_pivot_weight_version"


def load_version(worker: Any, path: str, version: int) -> int:
    """Load the HF directory ``path`` into ``worker`` as policy version ``version`` and return that version.

    The weights' memory must be mapped: after a sleep, ``AsyncLLM.wake_up(tags=["weights"])`` comes first (waking it
    here would map it a second time in ``wake_up``). The engine must be paused and its prefix cache reset.

    Raises CheckpointError, with the old weights untouched, for a directory that is not a complete checkpoint of this
    model. When the reload itself fails the weights are mixed: the version becomes None, and the caller must load again.
    """
    from vllm.transformers_utils.config import get_config

    checkpoint.require_complete(path)
    trust_remote_code = worker.model_config.trust_remote_code
    # reload_weights points model_config.model at what it loaded last, which passed this check itself.
    reference = get_config(worker.model_config.model, trust_remote_code, worker.model_config.revision)
    checkpoint.require_same_model(path, get_config(path, trust_remote_code).to_dict(), reference.to_dict())
    setattr(worker, _VERSION, None)
    worker.reload_weights(weights_path=path)
    setattr(worker, _VERSION, version)
    return version


def served_version(worker: Any) -> int | None:
    """Version of the last successful ``load_version``, or None."""
    return getattr(worker, _VERSION, None)


def memory_report() -> dict[str, int]:
    """Bytes: resident set of this process, and device memory in use by everyone on this worker's device."""
    import psutil
    import torch

    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    return {"rss_bytes": psutil.Process().memory_info().rss, "device_bytes": total_bytes - free_bytes}
