"""Where engine front ends live, and how the rest of the system addresses one.

verl starts one Ray actor for each replica's front end. On a GPU node that is right. On the CPU platform eight of them
would cost minutes and gigabytes, so one ``EngineHost`` actor a node holds them all and forks engine processes from one
preloaded server. Either way the others see a *server handle* with verl's ``handle.method.remote(...)`` form.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import Any

import ray
from ray.actor import ActorHandle


class HostedServer:
    """Handle of a server object inside an ``EngineHost``; stands where verl expects a Ray actor handle. Picklable."""

    def __init__(self, host: ActorHandle, key: str) -> None:
        self._host = host
        self._key = key

    def __getattr__(self, name: str) -> _HostedMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        return _HostedMethod(self._host, self._key, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return HostedServer, (self._host, self._key)

    def __repr__(self) -> str:
        return f"HostedServer({self._key})"


class _HostedMethod:
    def __init__(self, host: ActorHandle, key: str, method: str) -> None:
        self._host = host
        self._key = key
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.call.remote(self._key, self._method, args, kwargs)


class HostedServerClass:
    """Stands where ``vLLMReplica.launch_servers`` expects ``ray.remote(vLLMHttpServer)``: ``options(...).remote(...)``.

    Args:
        host: the node's engine host, or None for a Ray actor of its own.
        extra: keyword arguments of ``ShiftHttpServer`` beyond verl's.
    """

    def __init__(self, host: ActorHandle | None, extra: dict[str, Any]) -> None:
        self._host = host
        self._extra = extra
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> HostedServerClass:
        chosen = HostedServerClass(self._host, self._extra)
        chosen._options = options
        return chosen

    def remote(self, **kwargs: Any) -> Any:
        if self._host is not None:
            key = self._options["name"]
            self._host.create.remote(key, {**kwargs, **self._extra})
            return HostedServer(self._host, key)
        from verl_pivot.verl_ext.server import ShiftHttpServer

        return ray.remote(ShiftHttpServer).options(**self._options).remote(**kwargs, **self._extra)


class EngineHost:
    """One Ray actor a node (CPU platform) that holds every engine front end of the node.

    ``create`` is not awaited by its caller, and Ray may deliver it after the first ``call``, which therefore waits.
    """

    def __init__(self) -> None:
        from verl_pivot.vllm_ext.forkserver import install

        install()
        self._servers: dict[str, asyncio.Future[Any]] = {}
        self._launch = asyncio.Lock()

    async def ready(self) -> bool:
        """Returns once vLLM is imported and engines can be forked."""
        import verl_pivot.verl_ext.server  # noqa: F401

        return True

    async def create(self, key: str, kwargs: dict[str, Any]) -> None:
        """Make the server ``key``; whoever calls it gets the error if that fails."""
        from verl_pivot.verl_ext.server import ShiftHttpServer

        server = self._server(key)
        try:
            server.set_result(ShiftHttpServer(**kwargs))
        except Exception as error:  # nobody awaits create
            server.set_exception(error)

    async def call(self, key: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method`` of the server ``key`` as if it were an actor of its own."""
        server = await asyncio.shield(self._server(key))
        # One launch at a time: vLLM's start-up reads and writes process-wide environment variables.
        guard = self._launch if method in ("launch_server", "relaunch") else contextlib.nullcontext()
        async with guard:
            result = getattr(server, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def shutdown(self) -> None:
        """End all engines; called by the trainer when the run ends."""
        for server in self._servers.values():
            if server.done() and server.exception() is None:
                server.result().shutdown_engine()
        self._servers.clear()

    def _server(self, key: str) -> asyncio.Future[Any]:
        if key not in self._servers:
            self._servers[key] = asyncio.get_running_loop().create_future()
        return self._servers[key]
