"""What vLLM's CPU backend needs so that weights can be loaded a second time.

verl's own weight sync calls ``load_weights`` on the live model and then ``process_weights_after_loading``
(verl/workers/rollout/vllm_rollout/utils.py ``update_weights_from_ipc``). On CPU the first of these dies and the second
is silently wrong. Each patch is applied when its module is first imported, in whatever process that is; the same
changes are proposed upstream in ``patches/``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from verl_pivot.import_hooks import on_import
from verl_pivot.vllm_ext.versions import installed_version

logger = logging.getLogger(__name__)

Hook = Callable[[ModuleType], None]


@dataclass(frozen=True)
class UpstreamPatch:
    """One change to one vLLM module."""

    name: str
    module: str
    location: str
    """Upstream file and line in the newest version it applies to."""
    reason: str
    remove_when: str
    versions: tuple[str, ...]
    """Releases whose source was read and tested with it."""
    target: str
    """Dotted name inside the module, and the parameters it must have: ``Class.method``."""
    parameters: tuple[str, ...]
    apply: Hook


def _keep_linear_weight(module: ModuleType) -> None:
    dispatch = module.dispatch_cpu_unquantized_gemm

    @functools.wraps(dispatch)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        dispatch(layer, remove_weight=False)

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def _prepack_experts_again(module: ModuleType) -> None:
    method_class = module.UnquantizedFusedMoEMethod
    setup_kernel = method_class._setup_kernel

    @functools.wraps(setup_kernel)
    def _setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update and self.unquantized_backend == module.UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method_class._setup_kernel = _setup_kernel


def _clear_expert_padding(module: ModuleType) -> None:
    experts_class = module.CPUUnquantizedExperts
    pad = experts_class._pad_moe_intermediate

    @functools.wraps(pad)
    def _pad_moe_intermediate(self: Any, layer: Any) -> None:
        size = self.moe_config.intermediate_size_per_partition
        padded = self._padded_intermediate_size(self.moe_config)
        if padded == size or layer.w13_weight.shape[1] != 2 * padded:
            pad(self, layer)
            return
        # Gate rows are loaded at 0, up rows at `padded`; what follows each is left from the packed layout.
        layer.w13_weight.data[:, size:padded] = 0
        layer.w13_weight.data[:, padded + size :] = 0
        layer.w2_weight.data[:, :, size:] = 0

    experts_class._pad_moe_intermediate = _pad_moe_intermediate


KEEP_LINEAR_WEIGHT = UpstreamPatch(
    name="keep-linear-weight",
    module="vllm.model_executor.layers.utils",
    location="vllm/model_executor/layers/linear.py:202, vllm/model_executor/layers/utils.py:348,363",
    reason="a layer taken by oneDNN or the AMX kernel loses its weight to an empty Parameter without a loader, and the "
    "next load_weights fails: 'Parameter' object has no attribute 'weight_loader'",
    remove_when="UnquantizedLinearMethod keeps the weight, or restores it before a reload",
    versions=("0.28.0",),
    target="dispatch_cpu_unquantized_gemm",
    parameters=("layer", "remove_weight"),
    apply=_keep_linear_weight,
)
PREPACK_EXPERTS_AGAIN = UpstreamPatch(
    name="prepack-experts-again",
    module="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
    location="vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:149-172",
    reason="CPU experts are prepacked on the first load only; after a weight update the kernel reads the plain layout "
    "as if it were packed, and the output is wrong without an error",
    remove_when="_setup_kernel prepacks on weight updates too",
    versions=("0.28.0",),
    target="UnquantizedFusedMoEMethod._setup_kernel",
    parameters=("self", "layer", "w13", "w2"),
    apply=_prepack_experts_again,
)
CLEAR_EXPERT_PADDING = UpstreamPatch(
    name="clear-expert-padding",
    module="vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    location="vllm/model_executor/layers/fused_moe/experts/cpu_moe.py:312-331",
    reason="experts whose width is not a multiple of 32 are padded on the first load; prepacking them again, as the "
    "patch above does, would pad the padded weights: a shape error",
    remove_when="_pad_moe_intermediate accepts weights that are padded already",
    versions=("0.28.0",),
    target="CPUUnquantizedExperts._pad_moe_intermediate",
    parameters=("self", "layer"),
    apply=_clear_expert_padding,
)
PATCHES = (KEEP_LINEAR_WEIGHT, PREPACK_EXPERTS_AGAIN, CLEAR_EXPERT_PADDING)


def _guarded(patch: UpstreamPatch) -> Hook:
    def apply_if_known(module: ModuleType) -> None:
        version = installed_version()
        if version not in patch.versions:
            logger.warning("vLLM %s: patch %s is made for %s; not applied", version, patch.name, patch.versions)
            return
        target: Any = module
        for part in patch.target.split("."):
            target = getattr(target, part)
        if tuple(inspect.signature(target).parameters) != patch.parameters:
            raise RuntimeError(f"patch {patch.name}: {patch.module}.{patch.target} has other parameters than expected")
        patch.apply(module)

    return apply_if_known


_hooks = {patch.name: _guarded(patch) for patch in PATCHES}


def install() -> None:
    """Apply every patch once its module is imported, or now. Idempotent; imports nothing of vLLM.

    Called by the plugin in every process that may run an engine, and by ``SleepingCPUWorker``. Raises RuntimeError, at
    the import of the module concerned, when a supported vLLM does not look as expected.
    """
    for patch in PATCHES:
        on_import(patch.module, _hooks[patch.name])
