"""What verl itself needs on the CPU platform. Each patch is applied right after its module is imported.

Changes to the same effect are proposed upstream in ``patches/verl-*.patch``; nothing at run time reads those.
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
from verl_pivot.verl_ext.versions import VERL, installed_verl

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerlPatch:
    """What one function of verl becomes: a wrapper around it, or where the flaw is inside it, its replacement."""

    name: str
    module: str
    function: str
    parameters: tuple[str, ...]
    """Parameters the function must have; anything else is refused."""
    location: str
    reason: str
    remove_when: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


def _one_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: Any = None, backend: Any = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def _own_snapshot(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> Any:
        shards, spec = original(model)
        return {name: (tensor.clone(), shard_spec) for name, (tensor, shard_spec) in shards.items()}, spec

    return fsdp2_sharded_save_to_cpu


def _configured_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    # Does not call the original: that names flash attention itself, and its first failure leads to trl's value head or
    # to an error about trl. So a critic that only trl can load is not loaded on a CPU.
    @functools.wraps(original)
    def load_valuehead_model(local_path: Any, torch_dtype: Any, model_config: Any, trust_remote_code: Any) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    return load_valuehead_model


ONE_GLOO = VerlPatch(
    name="one-gloo",
    module="verl.utils.distributed",
    function="initialize_global_process_group_ray",
    parameters=("timeout_second", "backend"),
    location="verl/utils/distributed.py:89",
    reason='the default backend becomes "cpu:gloo,cpu:gloo", and torch raises "Duplicate device type cpu"',
    remove_when="verl names each device type once",
    wrap=_one_gloo,
)
OWN_SNAPSHOT = VerlPatch(
    name="own-snapshot",
    module="verl.utils.fsdp_utils",
    function="fsdp2_sharded_save_to_cpu",
    parameters=("model",),
    location="verl/utils/fsdp_utils.py:1180",
    reason="the saved shards alias live weights that are on the CPU already, so that after an update old_log_probs are "
    "computed with the new weights, without an error",
    remove_when="fsdp2_sharded_save_to_cpu copies, as its FSDP1 twin does",
    wrap=_own_snapshot,
)
CONFIGURED_ATTENTION = VerlPatch(
    name="configured-attention",
    module="verl.utils.model",
    function="load_valuehead_model",
    parameters=("local_path", "torch_dtype", "model_config", "trust_remote_code"),
    location="verl/utils/model.py:649",
    reason='a critic is loaded with attn_implementation="flash_attention_2" whatever its configuration says, which '
    "fails on a CPU",
    remove_when="load_valuehead_model leaves the attention to the configuration, as the actor's loading does",
    wrap=_configured_attention,
)
PATCHES = (ONE_GLOO, OWN_SNAPSHOT, CONFIGURED_ATTENTION)


def apply(patch: VerlPatch, module: ModuleType) -> None:
    """Put what the patch makes of its function in its place. Idempotent; another verl release is left alone, with a
    warning.

    Raises RuntimeError when the function does not look as expected.
    """
    if installed_verl() != VERL:
        logger.warning("verl %s: patch %s is made for %s; not applied", installed_verl(), patch.name, VERL)
        return
    original = getattr(module, patch.function)
    if getattr(original, "patched_by", None) == patch.name:
        return
    found = tuple(inspect.signature(original).parameters)
    if found != patch.parameters:
        raise RuntimeError(
            f"patch {patch.name}: {patch.module}.{patch.function} has parameters {found}, not {patch.parameters}"
        )
    wrapper = patch.wrap(original)
    wrapper.patched_by = patch.name  # type: ignore[attr-defined]
    setattr(module, patch.function, wrapper)


_HOOKS = {patch.name: functools.partial(apply, patch) for patch in PATCHES}


def install() -> None:
    """Apply every patch once its module is imported, or now. Called by the plugin on the CPU platform; idempotent."""
    for patch in PATCHES:
        on_import(patch.module, _HOOKS[patch.name])
