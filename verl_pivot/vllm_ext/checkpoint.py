"""Is a directory a complete checkpoint of the model that an engine runs? Decided before any weight is dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_IRRELEVANT = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "attn_implementation", "_attn_implementation"}
)
"""Config fields that change neither the weights' shapes nor the computation with them."""


class CheckpointError(ValueError):
    """A directory cannot be loaded into this engine; the message names the directory and what is wrong with it."""


def require_complete(path: str) -> None:
    """Check that ``path`` holds a config and whole safetensors files.

    Reads headers only (milliseconds). Raises CheckpointError for a missing directory, config or weight file, and for a
    file shorter or longer than its own header says, which is what an interrupted copy looks like.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{path} is not a model directory: it has no config.json")
    files = _weight_files(directory)
    if not files:
        raise CheckpointError(f"{path} holds no *.safetensors file; write the checkpoint in safetensors format")
    for file in files:
        _require_whole(file)


def require_same_model(path: str, config: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Check that ``config`` (of ``path``) describes the model of ``reference`` (what the engine was built for).

    Raises CheckpointError that lists the fields that differ.
    """
    differences = list(_differences(config, reference))
    if differences:
        raise CheckpointError(
            f"{path} is another model than the engine runs ({'; '.join(differences)}); "
            "an engine only takes weights of the architecture it was started with"
        )


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    return [directory / name for name in sorted(names)]


def _require_whole(file: Path) -> None:
    """Layout: 8 bytes little-endian header length, JSON header with byte offsets, data."""
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            size_bytes = file.stat().st_size
            if header_bytes + 8 > size_bytes:
                raise CheckpointError(f"{file} is cut short: its header alone needs {header_bytes + 8} bytes")
            header = json.loads(stream.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error!r}") from error
    expected_bytes = 8 + header_bytes + max(ends, default=0)
    if size_bytes != expected_bytes:
        raise CheckpointError(f"{file} has {size_bytes} bytes, its header announces {expected_bytes}")


def _differences(config: Mapping[str, Any], reference: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in sorted((config.keys() | reference.keys()) - _IRRELEVANT):
        theirs, ours = config.get(key), reference.get(key)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            found += _differences(theirs, ours, f"{prefix}{key}.")
        elif theirs != ours:
            found.append(f"{prefix}{key}: {theirs!r}, engine has {ours!r}")
    return found
