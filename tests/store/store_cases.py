"""Versions and options that the tests of the parameter store share."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from verl_pivot.config.schema import StoreConfig
from verl_pivot.store import VersionReader

MIB = 1024 * 1024
WAIT_S = 60.0


def store_config(directory: Path, **options: int) -> StoreConfig:
    return StoreConfig(directory=str(directory), **{"reserve_bytes": 0, "shard_bytes": MIB, **options})


def filled(version: int, tensors: int = 6, elements: int = 40_000) -> Iterator[tuple[str, torch.Tensor]]:
    """A version in which every element is the version number; two shards of 1 MiB by default."""
    for index in range(tensors):
        yield f"layer.{index}.weight", torch.full((elements,), float(version))


def check_filled(reader: VersionReader, tensors: int = 6) -> None:
    """The version is complete and its own in every element."""
    reader.verify()
    seen = 0
    for _, tensor in reader.iter_tensors():
        low, high = tensor.aminmax()
        assert low == high == reader.version, f"version {reader.version} holds {low}..{high}"
        seen += 1
    assert seen == tensors


def leftovers(run_dir: Path) -> list[str]:
    """Names in any model's folder that are neither a version nor the pointer."""
    return sorted(entry.name for entry in run_dir.glob("*/.*"))


def told(connection: Connection) -> Any:
    """Next message of a child, in time."""
    assert connection.poll(WAIT_S), "the child process said nothing"
    return connection.recv()
