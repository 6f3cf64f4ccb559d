"""Run folders and their owners. A run folder lives as long as the process that created it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_pivot.config.schema import StoreConfig
from verl_pivot.store.errors import StoreClosed, StoreDeadline
from verl_pivot.store.layout import DEAD, RunLayout, is_run_id, new_run_id, remove_tree
from verl_pivot.store.locks import PathLock, lock_within, try_lock

_DIRECTORY_DEADLINE_S = 120.0


def create_run(config: StoreConfig) -> tuple[RunLayout, PathLock]:
    """Removes dead runs, makes a new run folder and takes its ownership: the returned lock, held until released."""
    directory = Path(config.directory).absolute()
    _make_directory(directory)
    with _directory_locked(directory):
        _sweep_locked(directory)
        layout = RunLayout(directory / new_run_id())
        layout.run_dir.mkdir(mode=0o700)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "created_s": time.time(), "config": asdict(config)}
        layout.owner.write_text(json.dumps(who, indent=1))
        ownership = try_lock(layout.owner)
    if ownership is None:
        raise StoreClosed(f"{layout.owner} was locked by another process as soon as it was made")
    return layout, ownership


def read_config(layout: RunLayout) -> StoreConfig:
    """Configuration of a run that lives. Raises StoreClosed when the run or its owner is gone."""
    with layout.alive():
        fields: dict[str, Any] = json.loads(layout.owner.read_text())["config"]
        unowned = try_lock(layout.owner, shared=True)
    if unowned is not None:
        unowned.release()
        raise StoreClosed(f"the owner of {layout.run_dir} is gone: the run is over and the next one removes its folder")
    return StoreConfig(**fields)


def remove_run(layout: RunLayout) -> None:
    """Removes a run folder. Every step may be repeated and may meet another process doing the same."""
    grave = layout.run_dir.with_name(DEAD + layout.run_dir.name)
    with suppress(FileNotFoundError):
        # Under its new name nobody can add to it while it is being removed.
        os.rename(layout.run_dir, grave)
    remove_tree(grave)


def sweep_dead_runs(directory: str | Path) -> list[str]:
    """Removes the run folders in ``directory`` whose owner is gone; returns their names.

    Called when a run starts, and by hand after a crash. Folders of living owners, of other users, and everything that
    is not a run folder stay. A missing directory is nothing to do.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        return []
    with _directory_locked(path):
        return _sweep_locked(path)


def _sweep_locked(directory: Path) -> list[str]:
    swept = []
    for name in sorted(os.listdir(directory)):
        run = name.removeprefix(DEAD)
        if is_run_id(run) and (directory / name).is_dir():
            with suppress(PermissionError):  # another user's
                if run != name:
                    remove_tree(directory / name)
                elif _remove_if_dead(RunLayout(directory / name)):
                    swept.append(name)
    return swept


def _remove_if_dead(layout: RunLayout) -> bool:
    try:
        ownership = try_lock(layout.owner)
    except FileNotFoundError:
        # Folder and owner file are made under the directory's lock, so its maker died in between.
        remove_run(layout)
        return True
    if ownership is None:
        return False
    with ownership:
        remove_run(layout)
    return True


def _make_directory(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir()
        directory.chmod(0o1777)  # runs of several users lie side by side, as in /tmp


@contextmanager
def _directory_locked(directory: Path) -> Iterator[None]:
    lock = lock_within(directory, _DIRECTORY_DEADLINE_S)
    if lock is None:
        raise StoreDeadline(
            f"{directory} has been locked for {_DIRECTORY_DEADLINE_S} s by another run that starts or sweeps there; "
            f"find the process with `fuser {directory}`, or set trainer.resource_shift.store.directory to another one"
        )
    with lock:
        yield
