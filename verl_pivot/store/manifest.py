"""What a version consists of: plain data, no movement. Written by the publisher, read by everyone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_pivot.store.errors import StoreCorrupt
from verl_pivot.store.layout import MANIFEST

FORMAT = 1
"""Raised with every change that older readers would misread."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version."""

    name: str
    dtype: str
    """As safetensors spells it: ``BF16``, ``F32``, ``I64`` ..."""
    shape: tuple[int, ...]
    shard: str
    """File that holds it."""


@dataclass(frozen=True)
class ShardEntry:
    """One safetensors file of a version."""

    name: str
    file_bytes: int
    edge_crc32: int
    """CRC-32 of the file's first and last MiB (``safetensors_file.edge_crc32``)."""


@dataclass(frozen=True)
class Manifest:
    """One version of one model."""

    model: str
    version: int
    created_s: float
    """Unix time of the commit."""
    total_bytes: int
    """Bytes of all tensors."""
    source: str | None
    """Model directory that the companions (and, for an imported version, the weights) came from."""
    shards: tuple[ShardEntry, ...]
    tensors: tuple[TensorEntry, ...]
    """In the order in which they were published."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises StoreCorrupt when the text is not a manifest of this format."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            shards = tuple(ShardEntry(**entry) for entry in fields.pop("shards"))
            tensors = tuple(TensorEntry(**{**e, "shape": tuple(e["shape"])}) for e in fields.pop("tensors"))
            return cls(**fields, shards=shards, tensors=tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreCorrupt(f"not a manifest of format {FORMAT} of the parameter store: {error!r}") from error


def read_manifest(version_dir: Path) -> Manifest:
    """Raises FileNotFoundError, or StoreCorrupt naming the file."""
    path = version_dir / MANIFEST
    try:
        return Manifest.from_json(path.read_text())
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{path}: {error}") from error
