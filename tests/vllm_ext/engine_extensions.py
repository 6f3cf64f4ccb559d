"""Worker extension classes for tests; imported in engine processes."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import random
from pathlib import Path
from typing import Any

from verl_pivot.vllm_ext import cpu_patches, distribution

distribution.install()

from verl_pivot.verl_ext.worker_extension import ShiftWorkerExtension  # noqa: E402


class ShiftExtension(ShiftWorkerExtension):
    """The extension that engines of a run have, with questions for tests."""

    def sync_weights(self, path: str) -> None:
        """What ``update_weights_from_ipc`` does with weights that have arrived."""
        from safetensors.torch import load_file
        from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        weights = [item for file in sorted(Path(path).glob("*.safetensors")) for item in load_file(file).items()]
        for model, model_config in self._iter_all_models_with_config():
            patch_vllm_moe_model_weight_loader(model)
            self._update_weights(weights, peft_config=None, base_sync_done=False)
            process_weights_after_loading(model, model_config, self.device)

    def expert_loaders(self) -> list[str]:
        return [
            getattr(parameter.weight_loader, "__qualname__", "?")
            for name, parameter in self.model_runner.model.named_parameters()
            if name.endswith(("w13_weight", "w2_weight"))
        ]

    def released_weights(self) -> list[str]:
        """Parameters whose memory went once the linear kernel had its packed copy."""
        return [name for name, parameter in self.model_runner.model.named_parameters() if parameter.numel() == 0]

    def compiled_frames(self) -> int:
        from torch._dynamo.utils import counters

        return counters["frames"]["total"]

    def surroundings(self) -> dict[str, Any]:
        """What a forked engine must not have taken from its server."""
        import numpy
        import torch

        return {
            "environ": dict(os.environ),
            "affinity": sorted(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "python_random": random.random(),
            "numpy_random": float(numpy.random.random()),
            "parent": os.getppid(),
        }


class ChosenPatches(ShiftExtension):
    """For the stock worker: exactly the patches named in TEST_PATCHES, whatever importing verl has applied."""

    def __new__(cls, **kwargs: Any) -> Any:
        chosen = os.environ["TEST_PATCHES"].split(",")
        for patch in cpu_patches.PATCHES:
            module = importlib.import_module(patch.module)
            *owners, name = patch.target.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, name, inspect.unwrap(getattr(owner, name)))
            if patch.name in chosen:
                patch.apply(module)
        return super().__new__(cls, **kwargs)
