"""Names and paths inside the store. Pure but for two questions to the file system.

<directory>/                                   sticky and writable by all, like /tmp
    run-<time>-<pid>-<random>/                 one run; private to its user
        owner.json                             locked by the owner for its life; holds the configuration
        <model>/                               locked by the publisher while it publishes
            current.json                       the newest version; replacing it is the commit of a publish
            v<version>/                        a Hugging Face model directory; locked (shared) by its readers
                model-00001-of-00002.safetensors ...
                model.safetensors.index.json
                store_manifest.json
                config.json, tokenizer ...     companions
            .writing-v<version>-<random>/      a version being written
            .removed-v<version>-<random>/      a version being removed
    .dead-run-.../                             a run being removed
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from verl_pivot.store.errors import StoreClosed

OWNER = "owner.json"
CURRENT = "current.json"
MANIFEST = "store_manifest.json"
INDEX = "model.safetensors.index.json"
WRITING = ".writing-"
REMOVED = ".removed-"
DEAD = ".dead-"

_RUN_ID = re.compile(r"run-\d{8}T\d{6}-\d+-[0-9a-f]{8}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r"v(0|[1-9]\d*)")


def new_run_id() -> str:
    """Unique on this machine and, by its random part, across containers that share a tmpfs."""
    return f"run-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{secrets.token_hex(4)}"


def is_run_id(name: str) -> bool:
    """Whether a folder of this name is a run. Nothing else in the store's directory is ever removed."""
    return _RUN_ID.fullmatch(name) is not None


def parse_version(name: str) -> int | None:
    """Version number of a version directory's name; None for any other name."""
    match = _VERSION.fullmatch(name)
    return int(match.group(1)) if match else None


def shard_name(index: int, count: int) -> str:
    """File name of shard ``index`` (from 0) of ``count``."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class RunLayout:
    """Paths of one run."""

    run_dir: Path

    @property
    def owner(self) -> Path:
        return self.run_dir / OWNER

    def model_dir(self, model: str) -> Path:
        """Raises ValueError when ``model`` cannot be a folder name."""
        if not _MODEL.fullmatch(model):
            raise ValueError(
                f"model name {model!r} cannot be a folder of the parameter store: use letters, digits, '.', '_' and "
                "'-', beginning with a letter or digit"
            )
        return self.run_dir / model

    def current(self, model: str) -> Path:
        return self.model_dir(model) / CURRENT

    def version_dir(self, model: str, version: int) -> Path:
        return self.model_dir(model) / f"v{version}"

    def new_writing_dir(self, model: str, version: int) -> Path:
        return self.model_dir(model) / f"{WRITING}v{version}-{secrets.token_hex(4)}"

    def new_removed_dir(self, model: str, version: int) -> Path:
        return self.model_dir(model) / f"{REMOVED}v{version}-{secrets.token_hex(4)}"

    def models(self) -> list[str]:
        """Models that have a folder, published or not."""
        with self.alive():
            return sorted(entry.name for entry in self.run_dir.iterdir() if entry.is_dir())

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Turns the file errors that a removed run folder causes into StoreClosed."""
        try:
            yield
        except FileNotFoundError as error:
            if self.run_dir.is_dir():
                raise
            raise StoreClosed(
                f"the run folder {self.run_dir} of the parameter store is gone: its owner has closed it, or has died "
                "and a later run removed it"
            ) from error


def remove_tree(path: Path) -> None:
    """Removes a folder; others may be removing it at the same time."""
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
    with suppress(FileNotFoundError):
        os.rmdir(path)
