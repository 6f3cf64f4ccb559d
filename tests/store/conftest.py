from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from store_cases import store_config
from store_processes import processes

from verl_pivot.store import ParameterStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ParameterStore]:
    with ParameterStore.create(store_config(tmp_path / "store")) as store:
        yield store


class Children:
    """Processes of one test; whatever still runs at its end is killed."""

    def __init__(self) -> None:
        self._children: list[BaseProcess] = []
        self._pids: list[int] = []

    def start(self, target: Callable[..., None], *args: Any) -> BaseProcess:
        child = processes.Process(target=target, args=args)
        child.start()
        self._children.append(child)
        return child

    def start_telling(self, target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
        """``target`` gets one end of a pipe as its last argument; the other end is returned."""
        ours, theirs = processes.Pipe(duplex=False)
        child = self.start(target, *args, theirs)
        theirs.close()
        return child, ours

    def adopt(self, pid: int) -> None:
        """A grandchild to kill at the end."""
        self._pids.append(pid)

    def kill_all(self) -> None:
        for child in self._children:
            child.kill()
            child.join()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def children() -> Iterator[Children]:
    children = Children()
    yield children
    children.kill_all()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 8 MiB; skips where mounting is not permitted."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
