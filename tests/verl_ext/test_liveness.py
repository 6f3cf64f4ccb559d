"""Workers that die are noticed; real Ray actors on this machine."""

from __future__ import annotations

import inspect
import os
import signal
import time
from concurrent.futures import Future

import pytest

ray = pytest.importorskip("ray")

from verl_pivot.verl_ext.liveness import WatchedCalls, WorkerWatch  # noqa: E402

pytestmark = pytest.mark.contract


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


def test_transfer_queue_keeps_the_handles_of_its_actors_where_they_are_looked_for() -> None:
    interface = pytest.importorskip("transfer_queue.interface")
    assert interface._TQ_CONTROLLER is None and interface._TQ_STORAGE is None
    close, start = inspect.getsource(interface.close), inspect.getsource(interface.init)
    assert "_TQ_CONTROLLER = TransferQueueController.options(" in start
    assert "for key, value in _TQ_STORAGE.items():" in close and "storage_handles = list(value.values())" in close


def test_a_wait_without_deadline_ends_when_it_is_in_vain() -> None:
    def check() -> None:
        if time.monotonic() > started_s + 0.2:
            raise RuntimeError("the queue is gone")

    handler = signal.getsignal(signal.SIGUSR1)
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match="the queue is gone"), WatchedCalls(check, interval_s=0.05):
        Future().result()
    assert time.monotonic() - started_s < 5.0
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_what_ends_by_itself_is_not_disturbed() -> None:
    checks: list[float] = []
    with WatchedCalls(lambda: checks.append(time.monotonic()), interval_s=0.01) as watched:
        time.sleep(0.1)
    assert checks and watched.found is None
    so_far = len(checks)
    time.sleep(0.05)
    assert len(checks) == so_far, "still checking"
