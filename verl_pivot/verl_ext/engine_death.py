"""How the death of an engine looks to those that call its server: clients that generate, and the control plane."""

from __future__ import annotations

from ray.exceptions import RayActorError


def engine_died(error: BaseException) -> bool:
    """True when the engine process or the actor that holds it is gone, as opposed to a call that it refused.

    Args:
        error: what awaiting a method of a server handle raised.
    """
    # By name: it comes out of the process that holds the engine, and importing vLLM takes callers seconds.
    return isinstance(error, RayActorError) or type(getattr(error, "cause", None)).__name__ == "EngineDeadError"
