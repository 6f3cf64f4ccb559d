"""Engine arguments of a CPU engine that can really sleep."""

from __future__ import annotations

from typing import Any

UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Given as a class path because vllm/platforms/cpu.py:183 silently turns the name "uni" into "mp"."""

SLEEPING_CPU_WORKER = "verl_pivot.vllm_ext.cpu_worker.SleepingCPUWorker"


def cpu_engine_kwargs(kv_cache_bytes: int) -> dict[str, Any]:
    """Arguments to merge into ``engine_kwargs.vllm`` of a rollout or a reward model on CPU.

    They win over what verl sets itself (vllm_async_server.py:349) and survive its way through the command line
    (vllm_rollout/utils.py build_cli_args_from_config): every value is a string, a positive integer, True, or a False
    that equals vLLM's default.

    ``kv_cache_bytes`` is the KV pool of one engine. The environment variable VLLM_CPU_KVCACHE_SPACE, when set,
    overrides it (vllm/platforms/cpu.py:169); leave it unset.
    Raises ValueError for a pool that is not positive.
    """
    if kv_cache_bytes <= 0:
        raise ValueError(f"kv_cache_bytes={kv_cache_bytes}: an engine needs a KV pool; give a positive number of bytes")
    return {
        # One process an engine: the core is the worker. It also halves memory and idle CPU use.
        "distributed_executor_backend": UNIPROC_EXECUTOR,
        "worker_cls": SLEEPING_CPU_WORKER,
        "kv_cache_memory_bytes": int(kv_cache_bytes),
        # Compiled graphs hold the addresses of the weights that sleep frees.
        "enforce_eager": True,
        # vLLM's own sleep mode is CUDA memory; on CPU asking for it is an error (vllm/config/model.py:596).
        "enable_sleep_mode": False,
    }
