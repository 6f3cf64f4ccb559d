"""Files that make a version a complete model directory: config, tokenizer, generation config, remote code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from verl_pivot.store.capacity import Room
from verl_pivot.store.layout import MANIFEST

_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)


def add_companions(folder: Path, hf_dir: Path | None, previous: Path | None, room: Room) -> None:
    """Puts companions into ``folder``: those of ``hf_dir``, or of the version before when none is given.

    A file that the version before already has (same name, size and time) is hard-linked, so that a tokenizer takes
    its memory once however many versions there are.
    """
    source = hf_dir if hf_dir is not None else previous
    if source is None:
        return
    for file in sorted(source.iterdir()):
        if _is_companion(file):
            known = previous / file.name if previous is not None else None
            if known is not None and _same(file, known):
                os.link(known, folder / file.name)
                continue
            with room.taking(file.stat().st_size):
                shutil.copy2(file, folder / file.name)


def _is_companion(file: Path) -> bool:
    hidden_or_weights = file.name.startswith(".") or file.name.endswith(_WEIGHT_SUFFIXES) or file.name == MANIFEST
    return file.is_file() and not hidden_or_weights


def _same(file: Path, known: Path) -> bool:
    if not known.is_file():
        return False
    one, other = file.stat(), known.stat()
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)
