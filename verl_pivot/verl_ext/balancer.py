"""The rollout balancer: verl's protocol over the admission queue of rollout.

Lives inside the control-plane actor, where the controller masks and admits slots without a remote call; agent-loop
workers reach it through that actor with verl's protocol (``RequestLoadBalancer``, verl/workers/rollout/router.py:32).
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_pivot.core.sequences import SequenceState
from verl_pivot.runtime.admission import AdmissionQueue


class ShiftBalancer(GlobalRequestLoadBalancer):
    """Gives requests the server that the queue chooses: the one that had the request's earlier turns, or the one with
    the fewest in flight; without room anywhere ``acquire`` waits.

    verl's own tables (``_servers``, ``_inflight_requests``) stay empty: the queue holds them.
    """

    def __init__(self, max_cache_size: int = 10_000) -> None:
        super().__init__(servers={}, max_cache_size=max_cache_size)
        self.queue = AdmissionQueue()
        self._handles: dict[str, Any] = {}

    def register(self, server_id: str, handle: Any, slot_id: int, limit: int) -> None:
        """Make a server known. It gets at most ``limit`` requests at a time once its slot is admitted."""
        self._handles[server_id] = handle
        self.queue.register(server_id, slot_id, limit)

    def slot_of_request(self, request_id: str) -> int | None:
        """Slot that the request was last given to."""
        return self.queue.slot_of(self._request_id_to_server.get(request_id, ""))

    # ---- verl's protocol ----------------------------------------------------------------------------------------

    async def acquire(
        self, request_id: str, resumes: bool = False, sequence: tuple[str, str, int, int] | None = None
    ) -> tuple[str, Any]:
        """A server for ``request_id``; waits while none has room. A request that was served before goes first, to the
        server of its earlier turns; one that ``resumes`` was cut off there, and goes wherever there is least to do.
        ``sequence``: the response that it is an attempt at (``core.sequences.SequenceState``)."""
        earlier = self._request_id_to_server.get(request_id)
        server_id = await self.queue.acquire(
            preferred=None if resumes else earlier,
            ahead=resumes or bool(earlier),
            sequence=None if sequence is None else SequenceState(*sequence),
        )
        self._request_id_to_server[request_id] = server_id
        return server_id, self._handles[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.queue.release(server_id)

    def require_acquire_fields(self) -> list[str]:
        return ["resumes", "sequence"]

    def get_all_servers(self) -> list[str]:
        return list(self.queue.open_engines())

    def get_total_inflight(self) -> int:
        return sum(self.queue.inflight().values())

    def get_inflight_count(self, server_id: str) -> int:
        return self.queue.open_engines().get(server_id, 0)

    def get_status(self) -> dict[str, Any]:
        servers = self.queue.open_engines()
        return {
            "servers": servers,
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(servers),
            "registered_handles": list(servers),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        return {**super().clear_sticky_cache(), "server_loads": self.queue.open_engines()}
