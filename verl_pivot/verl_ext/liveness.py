"""Actors that the trainer hands work to and never asks again: their death must end the run, not its progress.

verl's agent loop workers generate in background tasks and its reward workers are asked by those; when one dies its
prompts stay "running" for ever and the trainer polls without end. Lives in the trainer process.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

import ray
from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 2.0


class WorkerWatch:
    """Keeps one trivial call pending at each worker; Ray answers for those that are gone.

    Args:
        workers: what to call a worker in the error, and its handle. Handles that are no Ray actors are not watched.
    """

    def __init__(self, workers: Mapping[str, object]) -> None:
        self._workers = {name: worker for name, worker in workers.items() if isinstance(worker, ActorHandle)}
        self._calls: dict[ray.ObjectRef, str] = {}
        for name in self._workers:
            self._call(name)

    def check(self) -> None:
        """Never waits. Raises RuntimeError that names the worker which is gone. A worker that is only busy is fine."""
        if not self._calls:
            return
        answered, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in answered:
            name = self._calls.pop(call)
            try:
                ray.get(call)
            except ray.exceptions.RayActorError as error:
                raise RuntimeError(f"resource_shift: {_what_happened(name, error)}") from error
            self._call(name)

    def _call(self, name: str) -> None:
        self._calls[self._workers[name].__ray_call__.remote(_nothing)] = name


class WatchedCalls:
    """A context in which the main thread is torn out of whatever it waits for when ``check`` finds that it is in vain.

    verl's TransferQueue client waits for its actors without a deadline (transfer_queue/client.py, ``_run_coroutine``):
    a check between two such waits is never reached. A thread makes the check, and a signal carries its RuntimeError
    into the main thread. Entered by the trainer around verl's loop. In another thread than the main one, which cannot
    be torn out, the error is only logged. Remove when TransferQueue has deadlines.
    """

    def __init__(self, check: Callable[[], None], interval_s: float = WATCH_INTERVAL_S) -> None:
        self._check, self._interval_s = check, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched_calls", daemon=True)
        self._can_interrupt = False
        self.found: RuntimeError | None = None

    def __enter__(self) -> WatchedCalls:
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        if self._can_interrupt:
            self._otherwise = signal.signal(signal.SIGUSR1, self._raise)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._can_interrupt:
            signal.signal(signal.SIGUSR1, self._otherwise)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                self._check()
            except RuntimeError as error:
                self.found = error
                logger.error("%s", error)
                if self._can_interrupt and not self._over.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if self.found is not None and not self._over.is_set():
            raise self.found


def _what_happened(name: str, error: ray.exceptions.RayActorError) -> str:
    if error.actor_init_failed:
        cause = str(error).strip().splitlines()[-1]
        return f"{name} could not be set up: {cause} (the whole error is above); mend that and start again"
    return f"{name} is gone, and the prompts it worked on with it; resume from the last checkpoint ({error})"


def _nothing(_: object) -> None:
    return None
