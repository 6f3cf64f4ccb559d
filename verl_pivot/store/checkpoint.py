"""Safetensors checkpoints, read by memory mapping."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_pivot.store.layout import INDEX

if TYPE_CHECKING:
    import torch


def iter_file(path: Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one file: ``names`` in their order, or all.

    They are views of a private mapping: no copy is made until somebody writes to one, the file never changes, and
    they stay valid after the file is removed (its memory is freed with the last of them).
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys() if names is None else names:
            yield name, file.get_tensor(name)


@dataclass(frozen=True)
class Checkpoint:
    """A model directory on disk, as the importer sees it."""

    path: Path
    files: dict[str, list[str] | None]
    """File name to the tensors taken from it; None takes all."""

    @classmethod
    def find(cls, hf_dir: Path) -> Checkpoint:
        """Raises FileNotFoundError when ``hf_dir`` is no directory or has no (or not all) safetensors files."""
        if not hf_dir.is_dir():
            raise FileNotFoundError(f"{hf_dir} is not a model directory")
        index = hf_dir / INDEX
        files: dict[str, list[str] | None] = {}
        if index.is_file():
            for tensor, file in json.loads(index.read_text())["weight_map"].items():
                files[file] = [*(files.get(file) or []), tensor]
        else:
            files = {file.name: None for file in sorted(hf_dir.glob("*.safetensors"))}
        missing = [name for name in files if not (hf_dir / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(sorted(missing))}")
        if not files:
            raise FileNotFoundError(
                f"{hf_dir} has no *.safetensors files: load the model with transformers and save_pretrained() it there"
            )
        return cls(hf_dir, files)

    @property
    def file_bytes(self) -> int:
        return sum((self.path / name).stat().st_size for name in self.files)

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensors in self.files.items():
            yield from iter_file(self.path / name, tensors)
