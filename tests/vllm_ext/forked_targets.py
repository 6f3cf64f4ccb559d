"""What runs in processes forked by the light servers of ``test_forkserver``."""

from __future__ import annotations

import os
import random
import time
from multiprocessing import Process
from typing import Any

import numpy.random


def report(connection: Any) -> None:
    connection.send(
        {
            "environ": dict(os.environ),
            "affinity": os.sched_getaffinity(0),
            "cwd": os.getcwd(),
            "random": (random.random(), float(numpy.random.random())),
        }
    )


def wait_for_ever(connection: Any = None) -> None:
    if connection is not None:
        connection.send("here")
    time.sleep(600)


def front_end(connection: Any) -> None:
    """A front end with two engines: tells their pids and their server's, and waits to be killed."""
    from verl_pivot.vllm_ext import forkserver

    forkserver._server = forkserver._EngineForkServer(())
    engines: list[Process] = [forkserver._EngineProcess(target=wait_for_ever) for _ in range(2)]
    for engine in engines:
        engine.start()
    connection.send([*(engine.pid for engine in engines), forkserver._server._forkserver_pid])
    wait_for_ever()
