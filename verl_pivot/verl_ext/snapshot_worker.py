"""verl's actor worker whose saved weights are its own.

verl/experimental/separation/engine_workers.py:137 saves the weights that a step began with through
``fsdp2_sharded_save_to_cpu`` (verl/utils/fsdp_utils.py:1180). Shards that are on the CPU already, because the platform
is a CPU or because parameters are offloaded between updates (which lending a slot needs), are aliased there, and the
following restore writes through the alias: the update of a mini-batch would be lost. On the CPU platform
``cpu_patches.OWN_SNAPSHOT`` has corrected the function itself already. Remove when verl copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils.device import get_torch_device

from verl_pivot.verl_ext.cpu_patches import OWN_SNAPSHOT


class SnapshotActorWorker(DetachActorWorker):
    """Actor (and reference) worker for steps of several mini-batches; one per training GPU."""

    def _get_strategy_handlers(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        first_time = self._strategy_handlers is None
        save, restore = super()._get_strategy_handlers()
        copies = getattr(save, "patched_by", None) == OWN_SNAPSHOT.name
        if first_time and not copies and self.config.actor.strategy in ("fsdp2", "veomni"):
            save = copying(save)
            self._strategy_handlers = (save, restore)
        return save, restore


def copying(save: Callable[[Any], tuple[dict[str, Any], Any]]) -> Callable[[Any], tuple[dict[str, Any], Any]]:
    """``save`` with tensors of its own in what it returns."""

    def save_copies(model: Any) -> tuple[dict[str, Any], Any]:
        # verl offloads without waiting; a copy made on the host before that has ended would be torn
        get_torch_device().synchronize()
        shards, spec = save(model)
        return {name: (tensor.clone(), shard_spec) for name, (tensor, shard_spec) in shards.items()}, spec

    return save_copies
