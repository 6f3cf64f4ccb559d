"""Workers that the trainer hands work to and never asks again: their death must end the run, not its progress.

verl's agent loop workers generate in background tasks and its reward workers are asked by those; when one dies its
prompts stay "running" for ever and the trainer polls without end. Lives in the trainer process.
"""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.actor import ActorHandle


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


def _what_happened(name: str, error: ray.exceptions.RayActorError) -> str:
    if error.actor_init_failed:
        cause = str(error).strip().splitlines()[-1]
        return f"{name} could not be set up: {cause} (the whole error is above); mend that and start again"
    return f"{name} is gone, and the prompts it worked on with it; resume from the last checkpoint ({error})"


def _nothing(_: object) -> None:
    return None
