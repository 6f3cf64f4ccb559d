"""Drop and reload the weights of a vLLM model on the CPU.

vLLM records every parameter's shape, class and loader on the meta device before its first load (vllm/model_executor/
model_loader/reload/layerwise.py ``record_metadata_for_reloading``). Dropping puts those records back in place of the
weights; reading materialises them and goes through the first-load path, so the result is bit-identical to a fresh
engine. Covers unquantized models on one rank. Everything runs in the engine's process.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import mmap

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from verl_pivot.vllm_ext.checkpoint import CheckpointError


@torch.no_grad()
def drop_weights(model: nn.Module) -> None:
    """Free every recorded parameter and all packed copies of it. Buffers and the (small) linear ``bias`` stay.

    The caller runs ``trim_heap`` once nothing else refers to the weights.
    """
    shared: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
    for module in model.modules():
        _drop_parameters(module, shared)
        _drop_packed_copies(module)


def _drop_parameters(module: nn.Module, shared: dict[int, tuple[nn.Parameter, torch.Tensor]]) -> None:
    """``shared`` maps id(old) to (old, kept alive so that its id stays unique; new): tied weights stay tied."""
    recorded = get_layerwise_info(module).restore_metadata[0]
    for name, old in list(module._parameters.items()):
        if old is None or name not in recorded:
            continue
        if id(old) not in shared:
            shared[id(old)] = (old, _meta_twin(old, recorded[name], module))
        delattr(module, name)
        module.register_parameter(name, shared[id(old)][1])


def _meta_twin(old: nn.Parameter, record: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The recorded form of a parameter, with the loader that the live one has now.

    verl replaces the loader of expert weights on the live parameter (verl/utils/vllm/patch.py
    ``patch_vllm_moe_model_weight_loader``); the record still has vLLM's.
    """
    twin = restore_layer_refs(to_meta_tensor(record), module)
    if "weight_loader" in old.__dict__:
        twin.__dict__["weight_loader"] = old.__dict__["weight_loader"]
    return twin


def _drop_packed_copies(module: nn.Module) -> None:
    """Forget what ``process_weights_after_loading`` derived from the weights, so that it runs again in full."""
    # A closure over the oneDNN or sgl-kernel packed weight (vllm/model_executor/layers/utils.py:345,362).
    module.__dict__.pop("cpu_linear", None)
    module.__dict__.pop("_already_called_process_weights_after_loading", None)
    quant_method = getattr(module, "quant_method", None)
    if getattr(quant_method, "moe_kernel", None) is not None:
        # Its presence means "weight update", which skips the prepacking of CPU experts
        # (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:149).
        quant_method.moe_kernel = None


@torch.no_grad()
def materialise_weights(model: nn.Module) -> None:
    """Give every dropped parameter memory again, filled with NaN, its loader in place, ready for ``load_weights``."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, meta in list(module._parameters.items()):
            if meta is None or not meta.is_meta:
                continue
            if id(meta) not in made:
                fresh = materialize_meta_tensor(meta)
                if fresh.is_floating_point():
                    fresh.fill_(math.nan)
                made[id(meta)] = (meta, fresh)
            setattr(module, name, made[id(meta)][1])


@torch.no_grad()
def read_weights(model: nn.Module, vllm_config: VllmConfig, path: str) -> None:
    """Load materialised parameters from a HF directory and process them, as on first load.

    Raises CheckpointError when the checkpoint leaves an element unwritten or holds NaN (upstream does not notice a
    missing q, k or v behind a merged weight), and whatever vLLM's loader raises. The parameters are then unusable.
    """
    model_config = copy.copy(vllm_config.model_config)
    model_config.model, model_config.revision = path, None
    load_config = copy.copy(vllm_config.load_config)
    load_config.use_tqdm_on_load = False
    if load_config.load_format == "dummy":  # verl's default: the first weights come by sync
        load_config.load_format = "auto"
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(model_config.dtype):
        get_model_loader(load_config).load_weights(model, model_config)
        _require_written(model, path)
        process_weights_after_loading(model, model_config, torch.device("cpu"))


def _require_written(model: nn.Module, path: str) -> None:
    holes = [name for name, weight in model.named_parameters() if torch.isnan(weight).any()]
    if holes:
        raise CheckpointError(
            f"{path} lacks, or has NaN in, {len(holes)} of the model's weights: {', '.join(holes[:5])}"
        )


def trim_heap() -> None:
    """Return freed memory to the operating system: both glibc and tcmalloc keep it for themselves otherwise."""
    gc.collect()
    process = ctypes.CDLL(None)
    for release, arguments in (("malloc_trim", (0,)), ("MallocExtension_ReleaseFreeMemory", ())):
        if hasattr(process, release):
            getattr(process, release)(*arguments)


def give_back_pages(storage: torch.UntypedStorage) -> None:
    """Free the memory behind a storage without freeing the storage: it reads as zeros from now on, and each page takes
    memory again when it is next touched. Raises OSError where the system refuses; the storage is then unchanged, but
    for zeros in its first and last page."""
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first_page, last_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first_page >= last_page:
        ctypes.memset(start, 0, end - start)
        return
    # Other data may share the pages at either end.
    ctypes.memset(start, 0, first_page - start)
    ctypes.memset(last_page, 0, end - last_page)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(last_page - first_page), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) on the KV cache")


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers that have memory. Packed copies are opaque and not counted."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if not tensor.is_meta
    }
    return sum(storages.values())
