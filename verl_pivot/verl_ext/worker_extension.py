"""The class vLLM's worker inherits from (``worker_extension_cls``, one slot): verl's own plus versioned loading."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_pivot.vllm_ext.worker_extension import VersionedWeights


class ShiftWorkerExtension(VersionedWeights, vLLMColocateWorkerExtension):
    """verl's extension with ``pivot_load_version`` and its like; runs in the engine's worker process."""
