"""The interface that CPU and GPU workers share, with workers that are not real."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from verl_pivot.vllm_ext.checkpoint import CheckpointError
from verl_pivot.vllm_ext.worker_extension import VersionedWeights


class CpuLikeWorker(VersionedWeights):
    def load_version(self, path: str, version: int) -> int:
        self.loaded = (path, version)
        return version

    def served_version(self) -> int | None:
        return self.loaded[1]

    def memory_report(self) -> dict[str, int]:
        return {"rss_bytes": 1}


def test_a_worker_that_knows_versions_is_asked() -> None:
    worker = CpuLikeWorker()
    assert worker.pivot_loads_asleep()
    assert worker.pivot_load_version("/v3", 3) == 3
    assert worker.loaded == ("/v3", 3)
    assert worker.pivot_served_version() == 3
    assert worker.pivot_memory_report() == {"rss_bytes": 1}


class GpuLikeWorker(VersionedWeights):
    """``reload_weights`` and ``model_config`` as vllm/v1/worker/gpu_worker.py has them."""

    def __init__(self, path: str) -> None:
        self.model_config = SimpleNamespace(model=path, revision=None, trust_remote_code=False)
        self.reloaded: list[str] = []
        self.fails = False

    def reload_weights(self, weights_path: str) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.reloaded.append(weights_path)
        self.model_config.model = weights_path


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two of one model, and one of another."""
    import sys

    config_module = SimpleNamespace(
        get_config=lambda path, *_: _Config(json.loads((Path(path) / "config.json").read_text()))
    )
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.config", config_module)
    for name, width in (("v1", 4), ("v2", 4), ("other", 8)):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"hidden_size": width}))
        save_file({"w": np.ones(width, np.float32)}, path / "model.safetensors")
    return [str(tmp_path / name) for name in ("v1", "v2", "other")]


class _Config:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.to_dict = lambda: fields


def test_a_gpu_worker_reloads_in_place(checkpoints: list[str]) -> None:
    v1, v2, other = checkpoints
    worker = GpuLikeWorker(v1)
    assert not worker.pivot_loads_asleep()
    assert worker.pivot_served_version() is None
    assert worker.pivot_load_version(v2, 2) == 2
    assert (worker.reloaded, worker.pivot_served_version()) == ([v2], 2)
    for bad, message in ((other, "hidden_size: 8, engine has 4"), ("/missing", "no config.json")):
        with pytest.raises(CheckpointError, match=message):
            worker.pivot_load_version(bad, 3)
        assert (worker.reloaded, worker.pivot_served_version()) == ([v2], 2), "nothing was touched"


def test_a_gpu_worker_with_mixed_weights_has_no_version(checkpoints: list[str]) -> None:
    v1, v2, _ = checkpoints
    worker = GpuLikeWorker(v1)
    worker.pivot_load_version(v1, 1)
    worker.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.pivot_load_version(v2, 2)
    assert worker.pivot_served_version() is None
