"""Real CPU engines that sleep, wake and change weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from engine_helpers import MIB, distance, distance_to_hf, logprobs, rpc

pytestmark = pytest.mark.engine

EXTENSION = "engine_extensions.ShiftExtension"


def test_sleep_gives_weights_and_kv_back_to_the_system(llm: Callable[..., Any]) -> None:
    engine = llm(tiny.model_dir(tiny.DENSE_300MB), kv_cache_bytes=256 * MIB)
    before = logprobs(engine)
    awake = rpc(engine, "memory_report")
    assert awake["weight_bytes"] + awake["kv_bytes"] > 500 * MIB
    for _ in range(2):  # nothing may accumulate
        engine.sleep(level=1)
        asleep = rpc(engine, "memory_report")
        freed_bytes = awake["rss_bytes"] - asleep["rss_bytes"]
        assert freed_bytes >= 0.9 * (awake["weight_bytes"] + awake["kv_bytes"])
        assert asleep["kv_bytes"] == 0
        engine.wake_up()
        again = rpc(engine, "memory_report")
        assert again["rss_bytes"] <= awake["rss_bytes"] + 30 * MIB
        assert (again["weight_bytes"], again["kv_bytes"]) == (awake["weight_bytes"], awake["kv_bytes"])
    assert logprobs(engine) == before


def test_sampling_compiles_nothing(llm: Callable[..., Any]) -> None:
    engine = llm(tiny.model_dir(tiny.DENSE), worker_extension_cls=EXTENSION)
    logprobs(engine, temperature=1.0, top_p=0.9, logprobs=2)
    assert rpc(engine, "compiled_frames") == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [tiny.DENSE, tiny.DENSE_TIED, tiny.MOE, tiny.MOE_PADDED], ids=lambda s: s.name)
def test_versions_come_and_go_bit_by_bit(llm: Callable[..., Any], shape: tiny.TinyModel, dtype: str) -> None:
    path1, path2 = tiny.model_dir(shape, 1), tiny.model_dir(shape, 2)
    engine, fresh2 = llm(path1, dtype), llm(path2, dtype)
    first, second = logprobs(engine), logprobs(fresh2)
    assert distance(first, second) > 0.1

    engine.sleep(level=1)
    engine.wake_up()
    assert logprobs(engine) == first, "wake restores what slept"
    assert rpc(engine, "served_version") is None

    engine.sleep(level=2)
    assert rpc(engine, "load_version", path2, 7) == 7
    engine.wake_up()
    assert rpc(engine, "served_version") == 7
    assert logprobs(engine) == second, "loaded asleep"

    assert rpc(engine, "load_version", path1, 8) == 8
    assert logprobs(engine) == first, "loaded awake"

    engine.sleep(level=1)
    assert rpc(engine, "served_version") is None
    engine.wake_up(tags=["weights"])
    engine.wake_up(tags=["kv_cache"])
    assert (rpc(engine, "served_version"), logprobs(engine)) == (8, first)

    if dtype == "float32":
        assert distance_to_hf(engine, path1) < 1e-4
        assert distance_to_hf(fresh2, path2) < 1e-4


def _damaged(kind: str, tmp_path: Path) -> str:
    good = Path(tiny.model_dir(tiny.DENSE, 2))
    path = tmp_path / kind
    if kind == "missing":
        return str(path)
    if kind == "another":
        return tiny.model_dir(tiny.MOE, 1)
    shutil.copytree(good, path)
    weights = path / "model.safetensors"
    if kind == "no-config":
        (path / "config.json").unlink()
    elif kind == "broken-config":
        (path / "config.json").write_text("{")
    elif kind == "other-width":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    elif kind == "cut-short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "lacks-a-shard":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    return str(path)


DAMAGE = {
    "missing": "no config.json",
    "no-config": "no config.json",
    "broken-config": "no readable model config",
    "another": "another model",
    "other-width": "num_key_value_heads",
    "cut-short": "its header announces",
    "lacks-a-shard": "qkv_proj",
}


def test_a_bad_directory_changes_nothing(llm: Callable[..., Any], tmp_path: Path) -> None:
    path1, path2 = tiny.model_dir(tiny.DENSE, 1), tiny.model_dir(tiny.DENSE, 2)
    engine = llm(path1)
    rpc(engine, "load_version", path1, 1)
    first = logprobs(engine)
    for kind, message in DAMAGE.items():
        bad = _damaged(kind, tmp_path)
        with pytest.raises(Exception, match=message):
            rpc(engine, "load_version", bad, 2)
        assert (rpc(engine, "served_version"), logprobs(engine)) == (1, first), f"{kind}, awake: serves the old weights"

        engine.sleep(level=1)
        with pytest.raises(Exception, match=message):
            rpc(engine, "load_version", bad, 2)
        report = rpc(engine, "memory_report")
        assert report["kv_bytes"] == 0 and report["weight_bytes"] < MIB / 2, f"{kind}: still asleep"
        engine.wake_up()
        assert (rpc(engine, "served_version"), logprobs(engine)) == (1, first), f"{kind}, asleep: wakes with the old"

    engine.sleep(level=2)
    with pytest.raises(Exception, match="it has no config"):
        rpc(engine, "load_version", str(tmp_path / "missing"), 2)
    assert rpc(engine, "load_version", path2, 2) == 2, "a retry works"
    engine.wake_up()
    assert distance(logprobs(engine), first) > 0.1


def test_lost_weights_are_reported_and_can_be_replaced(llm: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copytree(tiny.model_dir(tiny.DENSE, 1), tmp_path / "v1")
    engine = llm(tiny.model_dir(tiny.DENSE, 1))
    rpc(engine, "load_version", str(tmp_path / "v1"), 1)
    shutil.rmtree(tmp_path / "v1")  # a store may prune what is still served
    with pytest.raises(Exception, match="load a version before this engine gets a request"):
        rpc(engine, "load_version", _damaged("lacks-a-shard", tmp_path), 2)
    assert rpc(engine, "served_version") is None
    path2 = tiny.model_dir(tiny.DENSE, 2)
    assert rpc(engine, "load_version", path2, 3) == 3
    assert distance_to_hf(engine, path2) < 1e-4


@pytest.mark.parametrize("shape", [tiny.DENSE, tiny.MOE], ids=["dense", "moe"])
def test_composes_with_the_extension_of_verl(llm: Callable[..., Any], shape: tiny.TinyModel) -> None:
    """Started as verl starts it: dummy weights, patched model, weights by sync; then our loads, then a sync again."""
    path1, path2 = tiny.model_dir(shape, 1), tiny.model_dir(shape, 2)
    engine = llm(path1, worker_extension_cls=EXTENSION, load_format="dummy")
    allowed = 100  # verl masks everything beyond len(tokenizer)
    assert rpc(engine, "pivot_loads_asleep")

    def samples_only_allowed() -> bool:
        from vllm import SamplingParams

        params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True)
        output = engine.generate([{"prompt_token_ids": [7, 8]}], params, use_tqdm=False)[0].outputs[0]
        return max(output.token_ids) < allowed

    rpc(engine, "sync_weights", path1)
    assert not samples_only_allowed(), "the control: without the mask"
    rpc(engine, "monkey_patch_model", allowed)
    loaders = rpc(engine, "expert_loaders")
    assert samples_only_allowed()
    assert rpc(engine, "pivot_served_version") is None
    synced = logprobs(engine)
    with pytest.raises(Exception, match="would lose the weights"):
        engine.sleep(level=1)
    engine.llm_engine.engine_core.call_utility("resume_scheduler")

    engine.sleep(level=2)
    assert rpc(engine, "pivot_load_version", path1, 1) == 1
    engine.wake_up()
    assert logprobs(engine) == synced, "both ways of loading agree"
    assert samples_only_allowed()
    assert rpc(engine, "expert_loaders") == loaders

    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])  # verl's order: memory, sync, KV
    rpc(engine, "sync_weights", path2)
    engine.wake_up(tags=["kv_cache"])
    assert rpc(engine, "pivot_served_version") is None
    second = logprobs(engine)
    assert distance(second, synced) > 0.1
    assert rpc(engine, "pivot_load_version", path2, 2) == 2
    assert logprobs(engine) == second
    assert samples_only_allowed()


STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
LINEAR, EXPERTS, PADDING = "keep-linear-weight", "prepack-experts-again", "clear-expert-padding"


@pytest.mark.parametrize("shape", [tiny.DENSE, tiny.MOE, tiny.MOE_PADDED], ids=["dense", "moe", "moe-padded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_sync_of_verl_needs_each_patch(
    llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shape: tiny.TinyModel, dtype: str
) -> None:
    path1, path2 = tiny.model_dir(shape, 1), tiny.model_dir(shape, 2)

    def loaded(patches: str) -> Any:
        monkeypatch.setenv("TEST_PATCHES", patches)
        return llm(path1, dtype, worker_cls=STOCK_WORKER, worker_extension_cls="engine_extensions.ChosenPatches")

    def synced(patches: str) -> Any:
        engine = loaded(patches)
        rpc(engine, "sync_weights", path2)
        return engine

    without_linear = loaded(f"{EXPERTS},{PADDING}")
    # vLLM packs linear weights only for kernels that this CPU has: no bfloat16 under AVX2 alone.
    if dtype == "float32" or rpc(without_linear, "released_weights"):
        with pytest.raises(Exception, match=r"weight_loader|into parameter \(torch.Size\(\[0\]\)\)"):
            rpc(without_linear, "sync_weights", path2)
    if shape is tiny.MOE_PADDED:
        with pytest.raises(Exception, match="must match the existing size"):
            synced(f"{LINEAR},{EXPERTS}")
    fresh2 = logprobs(llm(path2, dtype))
    patched = synced(f"{LINEAR},{EXPERTS},{PADDING}")
    assert logprobs(patched) == fresh2
    if dtype == "float32":
        assert distance_to_hf(patched, path2) < 1e-4
    if shape.experts:
        assert distance(logprobs(synced(f"{LINEAR},{PADDING}")), fresh2) > 0.1, "wrong without an error"
