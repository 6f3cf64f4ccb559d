"""Workers that die are noticed; real Ray actors on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray")

from verl_pivot.verl_ext.liveness import WorkerWatch  # noqa: E402

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_a_busy_worker_is_alive_and_a_killed_one_is_named(local_ray: None) -> None:
    class Worker:  # a local class travels by value: Ray's processes do not import this file
        def pid(self) -> int:
            return os.getpid()

        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    busy, doomed = (ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2))
    pid = ray.get(doomed.pid.remote())
    busy.work.remote(60.0)
    watch = WorkerWatch({"agent loop worker 0": busy, "reward worker 1": doomed, "no actor": object()})
    for _ in range(5):
        watch.check()
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    until_s = time.monotonic() + 20
    with pytest.raises(RuntimeError, match="reward worker 1 is gone"):
        while time.monotonic() < until_s:
            watch.check()
            time.sleep(0.05)


def test_a_worker_that_could_not_be_made_says_why(local_ray: None) -> None:
    class Worker:
        def __init__(self) -> None:
            raise FileNotFoundError("no reward.py here")

    watch = WorkerWatch({"reward worker 0": ray.remote(Worker).options(num_cpus=0).remote()})
    until_s = time.monotonic() + 20
    with pytest.raises(RuntimeError, match=r"reward worker 0 could not be set up: .*no reward\.py here") as raised:
        while time.monotonic() < until_s:
            watch.check()
            time.sleep(0.05)
    assert "checkpoint" not in str(raised.value)


def test_nothing_to_watch_is_fine(local_ray: None) -> None:
    WorkerWatch({}).check()
