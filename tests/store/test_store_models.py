"""Versions are complete Hugging Face model directories; checkpoints on disk are imported once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from store_cases import MIB, filled, leftovers, store_config, told
from store_processes import import_judge, processes

from verl_pivot.store import ParameterStore, StoreFull, VersionOrder

COMPANIONS = {"config.json": "{}", "tokenizer.json": "[1]", "chat_template.jinja": "{{ x }}", "modeling_own.py": "pass"}


def write_model_dir(path: Path, *, sharded: bool) -> dict[str, torch.Tensor]:
    """A checkpoint with companions and with files that must not be taken over."""
    path.mkdir()
    for name, text in COMPANIONS.items():
        (path / name).write_text(text)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes"):
        (path / name).write_text("not for the store")
    (path / "original").mkdir()
    tensors = {f"w{i}": torch.randn(100, 100).bfloat16() for i in range(4)}
    if not sharded:
        save_file(tensors, path / "model.safetensors")
        return tensors
    halves = {"a.safetensors": ("w0", "w1"), "b.safetensors": ("w2", "w3")}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, path / file)
    save_file(tensors, path / "consolidated.safetensors")
    weight_map = {name: file for file, names in halves.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_is_imported_with_its_companions(store: ParameterStore, tmp_path: Path, sharded: bool) -> None:
    tensors = write_model_dir(tmp_path / "hf", sharded=sharded)
    manifest = store.import_model("judge", tmp_path / "hf")
    assert (manifest.version, manifest.source) == (0, str(tmp_path / "hf"))
    with store.open_version("judge") as reader:
        got = dict(reader.iter_tensors())
        assert {name: (reader.path / name).read_text() for name in COMPANIONS} == COMPANIONS
        rest = {path.name for path in reader.path.iterdir()} - set(COMPANIONS)
        assert rest == {
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "store_manifest.json",
        }
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


def test_importing_again_does_nothing_and_another_model_is_refused(store: ParameterStore, tmp_path: Path) -> None:
    write_model_dir(tmp_path / "hf", sharded=False)
    write_model_dir(tmp_path / "other", sharded=False)
    first = store.import_model("policy", tmp_path / "hf")
    assert store.import_model("policy", tmp_path / "x" / ".." / "hf") == first
    with pytest.raises(VersionOrder, match=r"cannot be imported from .*other.*version 0 .*hf"):
        store.import_model("policy", tmp_path / "other")
    store.publish("policy", 1, filled(1))
    assert store.import_model("policy", tmp_path / "hf").version == 1


def test_two_processes_import_at_once(store: ParameterStore, tmp_path: Path, children) -> None:
    write_model_dir(tmp_path / "hf", sharded=True)
    barrier = processes.Barrier(3)
    pipes = [children.start_telling(import_judge, store.run_dir, tmp_path / "hf", barrier)[1] for _ in range(3)]
    created = {told(pipe) for pipe in pipes}
    assert len(created) == 1
    assert (store.versions("judge"), leftovers(store.run_dir)) == ([0], [])


def missing_directory(path: Path) -> None:
    pass


def no_safetensors(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").touch()


def missing_shard(path: Path) -> None:
    write_model_dir(path, sharded=True)
    (path / "b.safetensors").unlink()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing_directory, "is not a model directory"),
        (no_safetensors, r"has no \*.safetensors files"),
        (missing_shard, "names files that do not exist: b.safetensors"),
    ],
)
def test_what_cannot_be_imported(store: ParameterStore, tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match=message):
        store.import_model("judge", tmp_path / "hf")
    assert (store.versions("judge"), leftovers(store.run_dir)) == ([], [])


def test_an_import_that_does_not_fit(small_tmpfs: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.zeros(9 * MIB, dtype=torch.uint8)}, tmp_path / "hf" / "model.safetensors")
    with ParameterStore.create(store_config(small_tmpfs)) as store:
        with pytest.raises(StoreFull, match="version 0 of model 'judge'"):
            store.import_model("judge", tmp_path / "hf")
        assert store.versions("judge") == []


def test_companions_are_held_once_and_follow_their_source(store: ParameterStore, tmp_path: Path) -> None:
    hf_dir = tmp_path / "hf"
    write_model_dir(hf_dir, sharded=False)
    inodes = []
    for version, source in enumerate([hf_dir, hf_dir, None]):
        store.publish("policy", version, filled(version), hf_dir=source)
        with store.open_version("policy") as reader:
            assert {name: (reader.path / name).read_text() for name in COMPANIONS} == COMPANIONS
            inodes.append((reader.path / "tokenizer.json").stat().st_ino)
    assert len(set(inodes)) == 1
    (hf_dir / "tokenizer.json").write_text("[2]")
    os.utime(hf_dir / "tokenizer.json", ns=(1, 1))
    with store.open_version("policy") as old:
        store.publish("policy", 9, filled(9), hf_dir=hf_dir)
        with store.open_version("policy") as new:
            assert [(r.path / "tokenizer.json").read_text() for r in (old, new)] == ["[1]", "[2]"]


def tiny_qwen3(*, tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).bfloat16()


@pytest.mark.parametrize(("tied", "drop_head"), [(False, False), (True, False), (True, True)])
def test_transformers_loads_a_version(store: ParameterStore, tmp_path: Path, tied: bool, drop_head: bool) -> None:
    from transformers import Qwen3ForCausalLM

    model = tiny_qwen3(tied=tied)
    model.config.save_pretrained(tmp_path / "hf")
    weights = model.state_dict()
    if drop_head:
        del weights["lm_head.weight"]
    manifest = store.publish("policy", 1, weights.items(), hf_dir=tmp_path / "hf")
    assert len(manifest.tensors) == len(weights)
    with store.open_version("policy") as reader:
        loaded, report = Qwen3ForCausalLM.from_pretrained(reader.path, dtype="bfloat16", output_loading_info=True)
    assert not any(report.values()), report
    got = loaded.state_dict()
    expected = model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.contract
def test_vllms_loader_reads_a_version(tmp_path: Path) -> None:
    """vllm/model_executor/model_loader/default_loader.py, ``get_all_weights``."""
    config_module = pytest.importorskip("vllm.config")
    loader_module = pytest.importorskip("vllm.model_executor.model_loader.default_loader")
    sent = {f"layers.{i}.weight": torch.randn(300, 300).bfloat16() for i in range(12)}
    with ParameterStore.create(store_config(tmp_path)) as store:
        assert len(store.publish("policy", 1, sent.items()).shards) > 1
        loader = loader_module.DefaultModelLoader(config_module.LoadConfig(load_format="safetensors"))
        with store.open_version("policy") as reader:
            model_config = SimpleNamespace(model=str(reader.path), revision=None)
            got = dict(loader.get_all_weights(model_config, torch.nn.Module()))
    assert got.keys() == sent.keys()
    assert all(torch.equal(got[name], sent[name]) for name in sent)
