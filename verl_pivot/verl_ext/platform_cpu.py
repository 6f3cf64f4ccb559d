"""verl's platform ``cpu``: real workers, FSDP over gloo and vLLM's CPU backend, with virtual GPUs counted by Ray.

Chosen with ``VERL_PLATFORM=cpu`` only; it never wins verl's detection. Registered in every process by the plugin,
before verl resolves its platform (verl/plugin/platform/platform_manager.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"


def is_chosen() -> bool:
    """Whether this process is to run on the CPU platform (verl's own rule: the environment decides)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME


class _DeviceProperties:
    name = "cpu"
    total_memory = 0
    multi_processor_count = 1


class CpuDeviceModule(types.ModuleType):
    """What verl asks of ``torch.<device>`` (``get_torch_device()``); ``torch.cpu`` has only a part of it.

    Memory figures are those of the process: resident bytes now, and their peak.
    """

    Stream = torch.cpu.Stream
    Event = torch.cpu.Event
    stream = staticmethod(torch.cpu.stream)
    current_stream = staticmethod(torch.cpu.current_stream)
    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)
    nvtx = types.SimpleNamespace(range=lambda *_args, **_kwargs: contextlib.nullcontext())

    def __init__(self) -> None:
        super().__init__("verl_pivot.cpu_device", "Stands in for torch.cuda on the CPU platform.")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, _device: Any) -> None: ...

    def synchronize(self, _device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def set_per_process_memory_fraction(self, _fraction: float, _device: Any = None) -> None: ...

    def reset_peak_memory_stats(self, _device: Any = None) -> None: ...

    def get_rng_state(self, _device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, _device: Any = None) -> str:
        # a key of verl.utils.flops_counter._DEVICE_FLOPS
        return "CPU"

    def get_device_properties(self, _device: Any = None) -> _DeviceProperties:
        return _DeviceProperties()

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def memory_allocated(self, _device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = memory_allocated

    def max_memory_allocated(self, _device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated


_DEVICE_MODULE = CpuDeviceModule()


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):
    """One CPU device per process. Ray counts virtual GPUs (``ray_kwargs.ray_init.num_gpus``) for placement."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return is_chosen()

    def current_device(self) -> torch.device:  # type: ignore[override]
        # Not an index: verl hands it to Tensor.to() and FSDP (verl/workers/engine/fsdp/transformer_impl.py:730,935),
        # and torch takes an index to mean the accelerator, of which there is none.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # Follows the Ray resource below. vLLM's CPU platform has a variable of its own, for memory nodes.
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # verl/single_controller/ray/base.py:230 counts only "GPU" and "NPU", and
        # verl/workers/rollout/vllm_rollout/vllm_async_server.py:1348 looks the name up in Ray's accelerator ids.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def is_ipc_supported(self) -> bool:
        # weights then go over POSIX shared memory (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py)
        return False

    def cudart(self) -> Any:
        return None
