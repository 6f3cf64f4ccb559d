"""One interface for versioned weights in CPU and GPU workers, for use with ``worker_extension_cls``.

vLLM mixes the extension class into the worker and refuses attributes that the worker has already
(vllm/v1/worker/worker_base.py:272), hence the prefix. Imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

from verl_pivot.vllm_ext import gpu_load


class VersionedWeights:
    """Mixin for a vLLM worker; every method is called by ``collective_rpc`` and runs in the worker's process."""

    def pivot_loads_asleep(self) -> bool:
        """Whether ``pivot_load_version`` takes an engine that is fully asleep. If not, call
        ``AsyncLLM.wake_up(tags=["weights"])`` before it and ``wake_up(tags=["kv_cache"])`` after it."""
        return self._pivot_own("load_version") is not None

    def pivot_load_version(self, path: str, version: int) -> int:
        """Load a HF directory and return the version now served; see ``SleepingCPUWorker.load_version`` and
        ``gpu_load.load_version`` for what may be raised and what is served then."""
        own = self._pivot_own("load_version")
        return own(path, version) if own else gpu_load.load_version(self, path, version)

    def pivot_served_version(self) -> int | None:
        """Version of the weights in memory; None when there are none or they have no version."""
        own = self._pivot_own("served_version")
        return own() if own else gpu_load.served_version(self)

    def pivot_memory_report(self) -> dict[str, int]:
        """Bytes in use; the keys depend on the device, ``rss_bytes`` is always there."""
        own = self._pivot_own("memory_report")
        return own() if own else gpu_load.memory_report()

    def _pivot_own(self, name: str) -> Any:
        """The worker's own method, where its class knows about versions (``SleepingCPUWorker``)."""
        return getattr(self, name, None)
