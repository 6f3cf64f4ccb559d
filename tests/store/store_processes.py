"""What other processes do in the tests of the parameter store. Each function is the target of a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from store_cases import WAIT_S, check_filled, filled, store_config

from verl_pivot.store import ParameterStore

# Children fork from a server that has imported torch and holds no lock: starting one takes milliseconds.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "safetensors.torch", "verl_pivot.store"])


def publish_forever(run_dir: Path, first: int) -> None:
    store, version = ParameterStore.attach(run_dir), first
    while True:
        store.publish("policy", version, filled(version))
        version += 1


def publish_and_die(run_dir: Path, point: str, version: int) -> None:
    """Publishes and kills itself at ``point``."""
    real = {"rename": os.rename, "replace": os.replace, "path_rename": Path.rename}

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(filled(version)):
            if point == "second shard" and index == 5:
                die()
            yield item

    def rename(source: Any, target: Any) -> None:
        if point == "before the directory's rename" and Path(target).name == f"v{version}":
            die()
        real["rename"](source, target)
        if point == "while collecting" and Path(target).name.startswith(".removed"):
            die()

    def replace(source: Any, target: Any) -> None:
        if point == "before the pointer's replacement":
            die()
        real["replace"](source, target)
        if point == "after the pointer's replacement":
            die()

    os.rename, os.replace = rename, replace
    if point == "naming shards":
        Path.rename = die
    ParameterStore.attach(run_dir).publish("policy", version, dying_tensors())


def read_for(run_dir: Path, seconds: float, result: Connection) -> None:
    """Reads the newest version again and again; sends the versions seen, or the error."""
    store = ParameterStore.attach(run_dir)
    seen: list[int] = []
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            with store.open_version("policy") as reader:
                check_filled(reader)
                assert not seen or reader.version >= seen[-1], f"version went back to {reader.version}"
                seen.append(reader.version)
        result.send(seen)
    except Exception as error:
        result.send(f"{type(error).__name__}: {error}")


def hold(run_dir: Path, version: int, ready: Connection) -> None:
    """Holds a version, has a child that lives on, sends the child's pid, and waits to be killed."""
    reader = ParameterStore.attach(run_dir).open_version("policy", version)
    ready.send(_idle_child())
    signal.pause()
    reader.close()


def own(directory: Path, ready: Connection) -> None:
    """Owns a run, has a child that lives on, sends (run folder, child's pid), and waits to be killed."""
    store = ParameterStore.create(store_config(directory))
    ready.send((store.run_dir, _idle_child()))
    signal.pause()


def import_judge(run_dir: Path, hf_dir: Path, barrier: Any, result: Connection) -> None:
    store = ParameterStore.attach(run_dir)
    barrier.wait(WAIT_S)
    result.send(store.import_model("judge", hf_dir).created_s)


def _idle_child() -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        sys.exit(0)
    return pid
