"""Engine arguments of a CPU engine that can really sleep, and those it refuses. Imports nothing of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Given as a class path because vllm/platforms/cpu.py:183 silently turns the name "uni" into "mp"."""

SLEEPING_CPU_WORKER = "verl_pivot.vllm_ext.cpu_worker.SleepingCPUWorker"


def cpu_engine_kwargs(kv_cache_bytes: int) -> dict[str, Any]:
    """Arguments to merge into ``engine_kwargs.vllm`` of a rollout or a reward model on CPU.

    They win over what verl sets itself (verl/workers/rollout/vllm_rollout/vllm_async_server.py:349) and survive its way
    through the command line (verl/workers/rollout/vllm_rollout/utils.py, ``build_cli_args_from_config``): every value
    is a string, a positive integer, True, or a False that equals vLLM's default.

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


def require_supported(vllm_config: VllmConfig) -> None:
    """Raise ValueError, naming the option, for a configuration whose weights cannot be dropped and reloaded.

    Called by ``SleepingCPUWorker`` in the engine's process, before anything is loaded.
    """
    parallel = vllm_config.parallel_config
    obstacles = {
        "quantization": vllm_config.model_config.quantization,
        "enable_lora": vllm_config.lora_config is not None,
        "speculative_config": vllm_config.speculative_config is not None,
        "tensor_parallel_size": parallel.tensor_parallel_size > 1 and parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1 and parallel.pipeline_parallel_size,
        "enforce_eager": not vllm_config.model_config.enforce_eager and "False",
    }
    for option, value in obstacles.items():
        if value:
            raise ValueError(
                f"{option}={value} does not work with SleepingCPUWorker, which frees and reloads plain weights of one "
                "rank; unset it, or leave worker_cls unset for an engine that never sleeps"
            )
