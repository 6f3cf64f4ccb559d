"""Errors as they come out of a Ray actor."""

from __future__ import annotations

from ray.exceptions import RayTaskError


class EngineDeadError(RuntimeError):
    """Named as vLLM's (vllm/v1/engine/exceptions.py)."""


def task_error(cause: Exception) -> RayTaskError:
    """What awaiting a method raises that ended with ``cause``: an instance of RayTaskError and of the cause's class."""
    traceback = f"Traceback (most recent call last):\n{cause!r}"
    return RayTaskError("method", traceback, cause, proctitle="server", pid=1, ip="127.0.0.1").as_instanceof_cause()
