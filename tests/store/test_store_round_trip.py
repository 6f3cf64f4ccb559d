"""What is published comes back bit for bit, whatever its dtype, shape and memory."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from store_cases import MIB, filled, leftovers, store_config

from verl_pivot.store import ParameterStore, StoreCorrupt, VersionNotFound, VersionOrder
from verl_pivot.store.safetensors_file import read_header

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
DTYPES += ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
SHAPES = [(), (3,), (5, 7), (0, 4), (64, 1000)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def read_back(store: ParameterStore, model: str = "policy") -> dict[str, torch.Tensor]:
    with store.open_version(model) as reader:
        reader.verify()
        return dict(reader.iter_tensors())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_comes_back(store: ParameterStore, dtype: str) -> None:
    sent = {f"t{shape}": random_tensor(getattr(torch, dtype), shape) for shape in SHAPES}
    manifest = store.publish("policy", 0, sent.items())
    got = read_back(store)
    assert list(got) == list(sent)
    assert all(same_bits(got[name], sent[name]) for name in sent)
    assert manifest.total_bytes == sum(tensor.nbytes for tensor in sent.values())


def test_odd_sizes_of_mixed_dtypes_stay_aligned(store: ParameterStore) -> None:
    sent = {}
    for index, dtype in enumerate(DTYPES * 3):
        sent[f"odd.{index}"] = random_tensor(getattr(torch, dtype), (index % 5 + 1,))
        sent[f"even.{index}"] = random_tensor(torch.float64, (2,))
    store.publish("policy", 0, sent.items())
    got = read_back(store)
    assert all(same_bits(got[name], tensor) for name, tensor in sent.items())
    with store.open_version("policy") as reader:
        header = read_header(reader.path / "model-00001-of-00001.safetensors")
    assert all(header[name]["data_offsets"][0] % tensor.element_size() == 0 for name, tensor in sent.items())


def test_tensors_that_share_or_skip_memory(store: ParameterStore) -> None:
    weight = torch.randn(64, 32)
    sent = {
        "embed": weight,
        "lm_head": weight,
        "transposed": weight.t(),
        "strided": weight[::2, 1::3],
        "expanded": torch.ones(1, 8).expand(4, 8),
        "parameter": torch.nn.Parameter(weight[:5]),
    }
    store.publish("policy", 0, sent.items())
    got = read_back(store)
    assert all(same_bits(got[name], tensor.detach()) for name, tensor in sent.items())


def test_the_caller_may_reuse_a_tensors_memory(store: ParameterStore) -> None:
    def from_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(1001, dtype=torch.int16)  # also of a size that waits for the end of its file
        for index in range(5):
            yield f"t{index}", buffer.fill_(index)

    store.publish("policy", 0, from_one_buffer())
    got = read_back(store)
    assert [tensor.unique().tolist() for tensor in got.values()] == [[0], [1], [2], [3], [4]]


def test_publishing_does_not_gather_tensors(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(20):
            assert sum(reference() is not None for reference in alive) <= 1
            tensor = torch.zeros(1000)
            alive.append(weakref.ref(tensor))
            yield f"t{index}", tensor
            del tensor

    with ParameterStore.create(store_config(tmp_path, shard_bytes=1024 * MIB)) as store:
        assert len(store.publish("policy", 0, counted()).shards) == 1


def test_shards_keep_to_their_size_and_names(store: ParameterStore) -> None:
    sent = [(f"t{index}", torch.zeros(90_000)) for index in range(7)] + [("large", torch.zeros(600_000))]
    manifest = store.publish("policy", 0, sent)
    sizes = {shard.name: shard.file_bytes for shard in manifest.shards}
    assert list(sizes) == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert [size <= MIB for size in sizes.values()] == [True, True, True, True, False]
    with store.open_version("policy") as reader:
        assert {path.name: path.stat().st_size for path in reader.path.glob("*.safetensors")} == sizes
        index = json.loads((reader.path / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {tensor.name: tensor.shard for tensor in manifest.tensors}
        assert index["metadata"] == {"total_size": manifest.total_bytes}
        with safe_open(reader.path / "model-00001-of-00005.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_more_tensors_than_one_header_holds(store: ParameterStore) -> None:
    sent = {f"model.layers.{index}.some.rather.long.name.weight": torch.tensor([index]) for index in range(3000)}
    manifest = store.publish("policy", 0, sent.items())
    assert len(manifest.shards) == 2
    got = read_back(store)
    assert all(same_bits(got[name], tensor) for name, tensor in sent.items())


def test_writing_to_a_read_tensor_does_not_reach_the_store(store: ParameterStore) -> None:
    store.publish("policy", 0, filled(0))
    for tensor in read_back(store).values():
        tensor.fill_(7.0)
    assert all(tensor.eq(0).all() for tensor in read_back(store).values())


def test_read_tensors_outlive_lease_and_store(tmp_path: Path) -> None:
    with ParameterStore.create(store_config(tmp_path)) as store:
        store.publish("policy", 3, filled(3))
        kept = read_back(store)
    assert not store.run_dir.exists()
    assert all(tensor.eq(3).all() for tensor in kept.values())


class FullTensor(torch.Tensor):
    def full_tensor(self) -> None: ...


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], ValueError, "'a' was given twice"),
        ([], ValueError, "no tensors"),
        ([("__metadata__", torch.zeros(2))], ValueError, "__metadata__"),
        ([("c", torch.zeros(2, dtype=torch.complex64))], TypeError, "'c' has dtype complex64"),
        ([("s", torch.zeros(2).as_subclass(FullTensor))], TypeError, "'s' is sharded"),
    ],
)
def test_what_cannot_be_published(
    store: ParameterStore, tensors: list[tuple[str, torch.Tensor]], error: type[Exception], message: str
) -> None:
    store.publish("policy", 1, filled(1))
    with pytest.raises(error, match=message):
        store.publish("policy", 2, tensors)
    assert store.current_version("policy") == 1
    assert leftovers(store.run_dir) == []


def test_an_error_of_the_tensors_leaves_nothing(store: ParameterStore) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from filled(0)
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        store.publish("policy", 0, failing())
    assert (store.versions("policy"), leftovers(store.run_dir)) == ([], [])
    with pytest.raises(VersionNotFound, match="no published version"):
        store.open_version("policy")
    assert store.publish("policy", 0, filled(0)).version == 0


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 4), (0, 0)])
def test_versions_only_grow(store: ParameterStore, first: int, second: int) -> None:
    store.publish("policy", first, filled(first))
    with pytest.raises(VersionOrder, match=f"version {first} is served"):
        store.publish("policy", second, filled(second))
    store.publish("judge", second, filled(second))  # each model counts for itself


@pytest.mark.parametrize("model", ["", "..", "a/b", ".hidden", "-x"])
def test_model_names_stay_inside_the_run(store: ParameterStore, model: str) -> None:
    with pytest.raises(ValueError, match="model name"):
        store.publish(model, 0, filled(0))


def damage_size(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def damage_header(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"?")


def damage_end(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1")


def exchange(path: Path) -> None:
    other = path.with_name(path.name.replace("00001-", "00002-"))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


@pytest.mark.parametrize("damage", [damage_size, damage_header, damage_end, exchange])
def test_verify_finds_damage(store: ParameterStore, damage) -> None:
    store.publish("policy", 0, filled(0))
    with store.open_version("policy") as reader:
        reader.verify()
        damage(reader.path / "model-00001-of-00002.safetensors")
        with pytest.raises(StoreCorrupt, match="model-0000"):
            reader.verify()
