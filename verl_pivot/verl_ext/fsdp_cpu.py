"""verl's FSDP2 engines for the device ``cpu``.

Upstream registers them for "cuda" and "npu" only (verl/workers/engine/fsdp/transformer_impl.py:1143,1594), although
nothing in them needs an accelerator. FSDP1 stays unregistered: it cannot broadcast module states on a CPU. Remove when
upstream registers a device "cpu".
"""

from __future__ import annotations

from types import ModuleType


def register(engine: ModuleType) -> None:
    """Register actor/reference and critic engines. Called after ``verl.workers.engine`` is imported; idempotent."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    registry = engine.EngineRegistry
    for model_type, engine_class in (
        ("language_model", FSDPEngineWithLMHead),
        ("value_model", FSDPEngineWithValueHead),
    ):
        if "cpu" not in registry._engines.get(model_type, {}).get("fsdp2", {}):
            registry.register(model_type=model_type, backend="fsdp2", device="cpu")(engine_class)
