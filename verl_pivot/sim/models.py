"""Models and machines of a simulated cluster, read from a cost file; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from verl_pivot.core.cost_book import KIND, CostBook, CostBookError
from verl_pivot.core.costs import DecodeCost, is_figure

FITTED_ON = "H20"
"""GPU of the published decode costs."""
BYTES_PER_PARAMETER = 2
"""Weights in bfloat16."""
MEMORY_SHARE = 0.9
"""Of GPU memory for weights and KV cache (vLLM's gpu_memory_utilization)."""
ACTIVATION_BYTES = 4e9
"""Of one GPU, for activations and CUDA graphs of an engine."""
PREFILL_MFU = 0.5
"""Share of the peak that prefill reaches: ours, no published figure."""

KV_BYTES_PER_TOKEN = {
    "Qwen2.5-1.5B": 28 * 2 * 2 * 128 * 2,
    "Qwen2.5-7B": 28 * 2 * 4 * 128 * 2,
    "GLM-Z1-9B": 40 * 2 * 2 * 128 * 2,
    "Qwen2.5-32B": 64 * 2 * 8 * 128 * 2,
    "Qwen3-30B-A3B": 48 * 2 * 4 * 128 * 2,
    "Qwen2.5-72B": 80 * 2 * 8 * 128 * 2,
    "Qwen3.5-122B-A10B": 12 * 2 * 2 * 256 * 2,
}
"""Layers x (key and value) x KV heads x head size x 2 bytes, from the models' published configurations; of
Qwen3.5-122B-A10B only every fourth layer keeps a KV cache that grows. A cost file may say ``kv_bytes_per_token``."""


class CostFileError(ValueError):
    """A cost file cannot be used; the message names the file, the entry and the figure."""


def read_book(path: Path) -> CostBook | None:
    """The cost book in ``path``; None when the file is of another kind. Raises CostFileError that names the figure."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CostFileError(f"cost file {path} cannot be read: {error}") from None
    if not isinstance(content, Mapping) or content.get("kind") != KIND:
        return None
    try:
        return CostBook.from_json(content)
    except CostBookError as error:
        raise CostFileError(f"cost file {path}: {error}") from None


@dataclass(frozen=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_bytes: float
    flops_per_s: float
    """Peak in bfloat16."""


@dataclass(frozen=True)
class Model:
    """A model at one tensor-parallel size."""

    name: str
    tp: int
    decode: DecodeCost
    parameters: float
    active_parameters: float
    kv_bytes_per_token: float

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER

    def kv_tokens(self, gpu: Gpu) -> int:
        """Tokens that the KV cache of one engine holds. Raises ValueError when the weights do not fit."""
        usable = self.tp * (gpu.memory_bytes * MEMORY_SHARE - ACTIVATION_BYTES)
        left = usable - self.weight_bytes
        if left < 2048 * self.kv_bytes_per_token:
            raise ValueError(
                f"{self.name} does not fit: {self.weight_bytes / 1e9:.0f} GB of weights on {self.tp} x {gpu.name} "
                f"leave {left / 1e9:.1f} GB for the KV cache; use an entry with a larger tp"
            )
        return int(left / self.kv_bytes_per_token)

    def prefill_s_per_token(self, gpu: Gpu) -> float:
        return 2 * self.active_parameters / (PREFILL_MFU * gpu.flops_per_s * self.tp)


@dataclass(frozen=True)
class CostFile:
    """Everything measured about models and hardware."""

    models: tuple[Model, ...]
    gpus: Mapping[str, Gpu]
    training_mfu: Mapping[str, float]

    @classmethod
    def read(cls, path: Path | None = None) -> CostFile:
        """From ``path``, or the published figures that come with the package. Raises CostFileError."""
        if path is None:
            text = resources.files("verl_pivot.sim").joinpath("decode_cost_models.json").read_text()
            return cls.from_json(json.loads(text), "the published cost file")
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CostFileError(f"cost file {path} cannot be read: {error}") from None
        return cls.from_json(content, f"cost file {path}")

    @classmethod
    def from_json(cls, content: Any, where: str) -> CostFile:
        if not isinstance(content, Mapping) or not isinstance(content.get("models"), list) or not content["models"]:
            raise CostFileError(f"{where} has no list named models")
        models = tuple(_model(entry, f"{where}: models[{at}]") for at, entry in enumerate(content["models"]))
        for key in ("hardware", "training_mfu"):
            if not isinstance(content.get(key, {}), Mapping):
                raise CostFileError(f"{where}: {key} is {content[key]!r}: it must be an object")
        gpus = {
            name: Gpu(
                name,
                _positive(entry, "mem_gb", f"{where}: hardware.{name}") * 1e9,
                _positive(entry, "bf16_tflops", f"{where}: hardware.{name}") * 1e12,
            )
            for name, entry in content.get("hardware", {}).items()
            if isinstance(entry, Mapping)
        }
        if not gpus:
            raise CostFileError(f"{where} names no hardware with mem_gb and bf16_tflops")
        mfu = content.get("training_mfu", {})
        shares = {key: _positive(mfu, key, f"{where}: training_mfu") for key in mfu if key != "source"}
        for key, share in shares.items():
            if share > 1:
                raise CostFileError(f"{where}: training_mfu: {key} is {share:g}: a share of the peak is at most 1")
        return cls(models, gpus, shares)

    def model(self, name: str, tp: int | None = None) -> Model:
        """The entry of ``name`` (its largest ``tp`` if none is given). Raises CostFileError with what there is."""
        fitting = [m for m in self.models if m.name.lower() == name.lower() and tp in (None, m.tp)]
        if not fitting:
            known = ", ".join(f"{m.name} (tp {m.tp})" for m in self.models)
            raise CostFileError(f"no costs for {name}{f' at tp {tp}' if tp else ''}; there are: {known}")
        return max(fitting, key=lambda m: m.tp)

    def gpu(self, name: str) -> Gpu:
        if name not in self.gpus:
            raise CostFileError(f"no hardware named {name}; there is: {', '.join(self.gpus)}")
        return self.gpus[name]

    def mfu(self, model: Model) -> float:
        """Share of the peak that training reaches: the file's figure for dense or mixture-of-experts models."""
        kind = "dense" if model.active_parameters == model.parameters else "moe_30b_a3b"
        return self.training_mfu.get(kind, 0.4 if kind == "dense" else 0.35)


def _model(entry: Any, where: str) -> Model:
    if not isinstance(entry, Mapping) or not entry.get("model"):
        raise CostFileError(f"{where} has no name under model")
    where = f"{where} ({entry['model']})"
    try:
        decode = DecodeCost.from_json_entry(entry)
    except (ValueError, TypeError) as error:
        raise CostFileError(f"{where}: {error}") from None
    parameters = _positive(entry, "params_b", where) * 1e9
    active = _positive(entry, "active_b", where) * 1e9 if "active_b" in entry else parameters
    tp = _positive(entry, "tp", where)
    if tp != int(tp):
        raise CostFileError(f"{where}: tp is {tp}: it must be a whole number")
    if "kv_bytes_per_token" in entry:
        kv_bytes = _positive(entry, "kv_bytes_per_token", where)
    elif entry["model"] in KV_BYTES_PER_TOKEN:
        kv_bytes = float(KV_BYTES_PER_TOKEN[entry["model"]])
    else:
        raise CostFileError(f"{where} lacks kv_bytes_per_token (layers x 2 x KV heads x head size x bytes)")
    return Model(entry["model"], int(tp), decode, parameters, active, kv_bytes)


def _positive(entry: Mapping[str, Any], key: str, where: str) -> float:
    if key not in entry:
        raise CostFileError(f"{where} lacks {key}")
    value = entry[key]
    if not is_figure(value) or not value:
        raise CostFileError(f"{where}: {key} is {value!s:.40}: it must be a number above 0")
    return float(value)
