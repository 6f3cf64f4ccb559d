"""Publishing: new versions of a model, streamed in, and made visible by one atomic step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl_pivot.config.schema import StoreConfig
from verl_pivot.store.capacity import Room
from verl_pivot.store.checkpoint import Checkpoint
from verl_pivot.store.collector import collect_model, remove_leftovers
from verl_pivot.store.companions import add_companions
from verl_pivot.store.errors import StoreBusy, StoreDeadline, VersionOrder
from verl_pivot.store.layout import CURRENT, INDEX, MANIFEST, WRITING, RunLayout
from verl_pivot.store.locks import PathLock, lock_within
from verl_pivot.store.manifest import Manifest, read_manifest
from verl_pivot.store.reader import current_version
from verl_pivot.store.shards import write_shards

if TYPE_CHECKING:
    import torch

    Tensors = Iterable[tuple[str, torch.Tensor]]


def publish(
    layout: RunLayout,
    config: StoreConfig,
    model: str,
    version: int,
    tensors: Tensors,
    *,
    hf_dir: Path | None,
    expected_bytes: int | None,
) -> Manifest:
    """Behind ``ParameterStore.publish``; see there."""
    lock = _lock_model(layout, model, 0.0)
    if lock is None:
        raise StoreBusy(f"model {model!r} in {layout.run_dir} is being published by another process or thread")
    with lock:
        return _publish_locked(layout, config, model, version, tensors, hf_dir, expected_bytes)


def import_model(layout: RunLayout, config: StoreConfig, model: str, hf_dir: Path, deadline_s: float) -> Manifest:
    """Behind ``ParameterStore.import_model``; see there."""
    hf_dir = hf_dir.resolve()
    lock = _lock_model(layout, model, deadline_s)
    if lock is None:
        raise StoreDeadline(f"another process has been publishing model {model!r} for more than {deadline_s} s")
    with lock:
        served = current_version(layout, model)
        if served is None:
            checkpoint = Checkpoint.find(hf_dir)
            tensors = checkpoint.iter_tensors()
            return _publish_locked(layout, config, model, 0, tensors, hf_dir, checkpoint.file_bytes)
        manifest = read_manifest(layout.version_dir(model, served))
    if manifest.source != str(hf_dir):
        raise VersionOrder(
            f"model {model!r} cannot be imported from {hf_dir}: the store already holds version {served} of it, made "
            f"from {manifest.source}; import it under another name"
        )
    return manifest


def _lock_model(layout: RunLayout, model: str, deadline_s: float) -> PathLock | None:
    folder = layout.model_dir(model)
    folder.mkdir(exist_ok=True)
    return lock_within(folder, deadline_s)


def _publish_locked(
    layout: RunLayout,
    config: StoreConfig,
    model: str,
    version: int,
    tensors: Tensors,
    hf_dir: Path | None,
    expected_bytes: int | None,
) -> Manifest:
    served = current_version(layout, model)
    if version <= (-1 if served is None else served):
        raise VersionOrder(
            f"version {version} of model {model!r} cannot be published: versions begin at 0 and only grow, and version "
            f"{served} is served"
        )
    room = Room(layout.run_dir, config, f"version {version} of model {model!r}", served)
    remove_leftovers(layout, model)
    collect_model(layout, model, config.keep_versions)
    room.check(expected_bytes or 0)
    with _undone_on_failure(layout, model):
        previous = layout.version_dir(model, served) if served is not None else None
        folder = layout.new_writing_dir(model, version)
        folder.mkdir(mode=0o700)
        manifest = _write_version(folder, model, version, tensors, hf_dir, previous, room)
        _commit(layout, manifest, folder, room)
    collect_model(layout, model, config.keep_versions)
    return manifest


@contextmanager
def _undone_on_failure(layout: RunLayout, model: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove_leftovers(layout, model)
        raise


def _write_version(
    folder: Path, model: str, version: int, tensors: Tensors, hf_dir: Path | None, previous: Path | None, room: Room
) -> Manifest:
    """Everything of a version, still invisible."""
    add_companions(folder, hf_dir, previous, room)
    written = write_shards(folder, tensors, room)
    manifest = Manifest(
        model=model,
        version=version,
        created_s=time.time(),
        total_bytes=written.total_bytes,
        source=_source(hf_dir, previous),
        shards=tuple(written.shards),
        tensors=tuple(written.tensors),
    )
    index = {
        "metadata": {"total_size": manifest.total_bytes},
        "weight_map": {tensor.name: tensor.shard for tensor in manifest.tensors},
    }
    _write_text(folder / INDEX, json.dumps(index, indent=1), room)
    _write_text(folder / MANIFEST, manifest.to_json(), room)
    return manifest


def _source(hf_dir: Path | None, previous: Path | None) -> str | None:
    if hf_dir is not None:
        return str(hf_dir)
    return read_manifest(previous).source if previous is not None else None


def _commit(layout: RunLayout, manifest: Manifest, folder: Path, room: Room) -> None:
    """Makes the version the served one. All that needs space comes before the first rename; until the last one the
    version before is served, and a version directory above the served version counts as never written."""
    model = manifest.model
    pointer = layout.model_dir(model) / f"{WRITING}{CURRENT}"
    fields = {"model": model, "version": manifest.version, "created_s": manifest.created_s}
    _write_text(pointer, json.dumps(fields), room)
    os.rename(folder, layout.version_dir(model, manifest.version))
    os.replace(pointer, layout.current(model))


def _write_text(path: Path, text: str, room: Room) -> None:
    with room.taking(len(text)):
        path.write_text(text)
