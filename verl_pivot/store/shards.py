"""Streams tensors into the shards of one version. Called by the publisher, in its own process and thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_pivot.store.capacity import Room
from verl_pivot.store.layout import shard_name
from verl_pivot.store.manifest import ShardEntry, TensorEntry
from verl_pivot.store.safetensors_file import ShardFile, dtype_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shards:
    """What ``write_shards`` has written."""

    total_bytes: int
    shards: tuple[ShardEntry, ...]
    tensors: tuple[TensorEntry, ...]


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], room: Room) -> Shards:
    """Writes all tensors into safetensors files of ``folder``, none larger than ``store.shard_bytes`` unless a single
    tensor is.

    Holds no more than the tensor it was last given. Tensors that share memory (tied weights) are each written in full:
    every name can then be loaded by itself, whatever a loader does about ties. Raises StoreFull; ValueError for a name
    given twice and for no tensors at all; TypeError for a tensor that cannot be stored.
    """
    open_shards = _OpenShards(folder, room)
    try:
        for name, tensor in tensors:
            open_shards.append(name, tensor)
        return open_shards.finish()
    finally:
        open_shards.close()


class _OpenShards:
    """Shards being written: all but the last are finished."""

    def __init__(self, folder: Path, room: Room) -> None:
        self._folder = folder
        self._room = room
        self._files: list[ShardFile] = []
        self._endings: list[tuple[int, int]] = []
        self._tensors: dict[str, tuple[int, str, tuple[int, ...]]] = {}

    def append(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._tensors:
            raise ValueError(f"tensor {name!r} was given twice for {self._room.subject}")
        if name == "__metadata__":
            raise ValueError("'__metadata__' cannot be the name of a tensor: safetensors keeps it for itself")
        if not self._files or not self._files[-1].accepts(name, tensor, self._room.config.shard_bytes):
            self._finish_last()
            self._files.append(ShardFile(self._folder / f"shard-{len(self._files)}.part", self._room))
        self._files[-1].append(name, tensor)
        self._tensors[name] = (len(self._files) - 1, dtype_name(name, tensor), tuple(tensor.shape))

    def finish(self) -> Shards:
        """Names the shards: how many there are is known only now."""
        if not self._files:
            raise ValueError(f"{self._room.subject} has no tensors")
        self._finish_last()
        names = [shard_name(index, len(self._files)) for index in range(len(self._files))]
        for file, name in zip(self._files, names, strict=True):
            file.path.rename(self._folder / name)
        return Shards(
            total_bytes=sum(file.data_bytes for file in self._files),
            shards=tuple(ShardEntry(name, *ending) for name, ending in zip(names, self._endings, strict=True)),
            tensors=tuple(TensorEntry(n, dtype, shape, names[i]) for n, (i, dtype, shape) in self._tensors.items()),
        )

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _finish_last(self) -> None:
        if self._files:
            self._endings.append(self._files[-1].finish())
