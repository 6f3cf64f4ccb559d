"""Reading versions, under a lease that keeps them from being removed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from verl_pivot.store.checkpoint import iter_file
from verl_pivot.store.errors import StoreCorrupt, StoreDeadline, VersionNotFound
from verl_pivot.store.layout import RunLayout, parse_version
from verl_pivot.store.locks import POLL_S, PathLock, try_lock
from verl_pivot.store.manifest import Manifest, ShardEntry, read_manifest
from verl_pivot.store.safetensors_file import edge_crc32, read_header

if TYPE_CHECKING:
    import torch


class VersionReader:
    """One version, held: it is not removed until ``close``, the end of a ``with`` block, or the end of the process."""

    def __init__(self, model: str, version: int, lease: PathLock) -> None:
        self.model = model
        self.version = version
        self.path: Path = lease.path
        """A Hugging Face model directory (when the publisher gave companions); never written to again."""
        self._lease = lease

    @cached_property
    def manifest(self) -> Manifest:
        """Read at first use."""
        return read_manifest(self.path)

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All (name, host tensor), shard by shard, memory-mapped: nothing is copied, and writing to one of them never
        reaches the store. Tensors may be kept after the lease is closed; the memory is then freed with them."""
        for shard in self.manifest.shards:
            names = [tensor.name for tensor in self.manifest.tensors if tensor.shard == shard.name]
            yield from iter_file(self.path / shard.name, names)

    def verify(self) -> None:
        """Checks every file against the manifest: size, tensor names, dtypes and shapes, edge CRC-32. Takes time by
        the number of shards, not by their size. Raises StoreCorrupt."""
        if (self.manifest.model, self.manifest.version) != (self.model, self.version):
            raise StoreCorrupt(
                f"{self.path} holds version {self.manifest.version} of model {self.manifest.model!r} instead of "
                f"version {self.version} of {self.model!r}"
            )
        for shard in self.manifest.shards:
            self._verify_shard(shard)

    def _verify_shard(self, shard: ShardEntry) -> None:
        path = self.path / shard.name
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file_bytes = os.fstat(fd).st_size
            if file_bytes != shard.file_bytes:
                raise StoreCorrupt(f"{path} has {file_bytes} bytes instead of {shard.file_bytes}")
            if edge_crc32(fd, file_bytes) != shard.edge_crc32:
                raise StoreCorrupt(f"{path} does not have the checksum that its manifest says")
        finally:
            os.close(fd)
        held = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in read_header(path).items()}
        said = {t.name: (t.dtype, t.shape) for t in self.manifest.tensors if t.shard == shard.name}
        if held != said:
            raise StoreCorrupt(f"{path} does not hold the tensors that its manifest says")

    def close(self) -> None:
        """Gives the lease back. Idempotent."""
        self._lease.release()

    def __enter__(self) -> VersionReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def current_version(layout: RunLayout, model: str) -> int | None:
    """Newest published version; None before the first. Raises StoreClosed when the run is gone."""
    with layout.alive():
        try:
            return int(json.loads(layout.current(model).read_text())["version"])
        except FileNotFoundError:
            os.stat(layout.run_dir)
            return None


def list_versions(layout: RunLayout, model: str) -> list[int]:
    """Published versions that still exist, oldest first."""
    served = current_version(layout, model)
    if served is None:
        return []
    found = map(parse_version, os.listdir(layout.model_dir(model)))
    return sorted(version for version in found if version is not None and version <= served)


def open_version(layout: RunLayout, model: str, version: int | None) -> VersionReader:
    """Behind ``ParameterStore.open_version``; see there."""
    while True:
        served = current_version(layout, model)
        wanted = served if version is None else version
        if served is None or wanted is None or wanted > served:
            raise VersionNotFound(_not_found(layout, model, version, served))
        try:
            lease = try_lock(layout.version_dir(model, wanted), shared=True)
        except FileNotFoundError:
            lease = None
        if lease is not None:
            return VersionReader(model, wanted, lease)
        # The version is being removed or has been. The newest one never is: by now there is a newer one.
        if version is not None:
            raise VersionNotFound(_not_found(layout, model, version, served))
        if current_version(layout, model) == served:
            raise StoreCorrupt(f"{layout.version_dir(model, served)} is the served version and cannot be opened")


def wait_for(layout: RunLayout, model: str, version: int, deadline_s: float) -> int:
    """Behind ``ParameterStore.wait_for``; see there."""
    end_s = time.monotonic() + deadline_s
    while True:
        served = current_version(layout, model)
        if served is not None and served >= version:
            return served
        if time.monotonic() >= end_s:
            raise StoreDeadline(
                f"version {version} of model {model!r} was not published within {deadline_s} s (now: {served})"
            )
        time.sleep(POLL_S)


def _not_found(layout: RunLayout, model: str, version: int | None, served: int | None) -> str:
    if served is None:
        return f"model {model!r} has no published version in {layout.run_dir}; models here: {layout.models()}"
    return (
        f"version {version} of model {model!r} is not in {layout.run_dir}: versions here are "
        f"{list_versions(layout, model)}; raise trainer.resource_shift.store.keep_versions if it was collected too soon"
    )
