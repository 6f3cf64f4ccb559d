from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from verl_pivot.vllm_ext.checkpoint import CheckpointError, require_complete, require_same_model

INDEX = "model.safetensors.index.json"


def _write(path: Path, sharded: bool) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    names = ["a.safetensors", "b.safetensors"] if sharded else ["model.safetensors"]
    for name in names:
        save_file({f"{name}.weight": np.ones((4, 3), np.float32)}, path / name, metadata={"format": "pt"})
    if sharded:
        (path / INDEX).write_text(json.dumps({"weight_map": {f"{name}.weight": name for name in names}}))
    return path


@pytest.mark.parametrize("sharded", [False, True])
def test_accepts_a_whole_checkpoint(tmp_path: Path, sharded: bool) -> None:
    require_complete(str(_write(tmp_path / "good", sharded)))


DAMAGE: dict[str, tuple[Any, str]] = {
    "no directory": (lambda path: [file.unlink() for file in path.iterdir()] and path.rmdir(), "no config.json"),
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "no weights": (
        lambda path: [(path / name).unlink() for name in ("a.safetensors", "b.safetensors", INDEX)],
        "holds no",
    ),
    "a shard is missing": (lambda path: (path / "b.safetensors").unlink(), "b.safetensors cannot be read"),
    "a shard is cut": (lambda path: _cut(path / "b.safetensors", -1), "its header announces"),
    "a shard is cut in its header": (lambda path: _cut(path / "b.safetensors", 20), "is cut short"),
    "a shard is empty": (lambda path: (path / "b.safetensors").write_bytes(b""), "is cut short"),
    "a shard has a tail": (lambda path: _append(path / "b.safetensors"), "its header announces"),
    "a shard is text": (
        lambda path: (path / "b.safetensors").write_bytes(b"\x08" + bytes(7) + b"not json"),
        "not a safe",
    ),
    "a header is a list": (lambda path: (path / "b.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "not a safe"),
    "the index is text": (lambda path: (path / INDEX).write_text("?"), "not a safetensors index"),
    "the index is empty": (lambda path: (path / INDEX).write_text("{}"), "not a safetensors index"),
}


def _cut(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


@pytest.mark.parametrize("damage", DAMAGE)
def test_says_what_is_wrong(tmp_path: Path, damage: str) -> None:
    path = _write(tmp_path / "bad", sharded=True)
    change, message = DAMAGE[damage]
    change(path)
    with pytest.raises(CheckpointError, match=message) as error:
        require_complete(str(path))
    assert str(path) in str(error.value)


CONFIG = {"hidden_size": 8, "architectures": ["A"], "rope": {"theta": 1.0, "type": "x"}, "dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({}, None),
        ({"dtype": "bfloat16", "transformers_version": "9", "_name_or_path": "x", "eos_token_id": 3}, None),
        ({"hidden_size": 9}, "hidden_size: 9, engine has 8"),
        ({"architectures": ["B"]}, r"architectures: \['B'\], engine has \['A'\]"),
        ({"rope": {"theta": 2.0, "type": "x"}}, "rope.theta: 2.0, engine has 1.0"),
        ({"extra": 1}, "extra: 1, engine has None"),
    ],
)
def test_compares_what_matters(change: dict[str, Any], difference: str | None) -> None:
    if difference is None:
        require_same_model("/there", {**CONFIG, **change}, CONFIG)
        return
    with pytest.raises(CheckpointError, match=difference):
        require_same_model("/there", {**CONFIG, **change}, CONFIG)
