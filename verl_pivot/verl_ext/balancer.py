"""The rollout balancer: verl's, with slots that come and go and requests that wait instead of failing.

Lives inside the control-plane actor, where the controller masks and admits slots without a remote call; agent-loop
workers reach it through that actor with verl's protocol (``LoadBalancerProtocol``, verl/workers/rollout/router.py:59).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


class ShiftBalancer(GlobalRequestLoadBalancer):
    """Implements ``runtime.ports.AdmissionPort`` for rollout.

    A server belongs to a slot. Only servers of admitted slots are chosen: the one with the fewest requests in flight,
    or the one that had this request's earlier turns while it is admitted. Without any, ``acquire`` waits.
    """

    def __init__(self, max_cache_size: int = 10_000) -> None:
        super().__init__(servers={}, max_cache_size=max_cache_size)
        self._slot_of: dict[str, int] = {}
        self._all_servers: dict[str, Any] = {}
        self._inflight: dict[str, int] = {}
        self._admitted: set[int] = set()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.on_demand: Any = None
        """Called without arguments when a request has to wait; the controller plans at once."""

    # ---- registration -------------------------------------------------------------------------------------------

    def register(self, server_id: str, handle: Any, slot_id: int) -> None:
        """Make a server known. It gets requests once its slot is admitted."""
        self._slot_of[server_id] = slot_id
        self._all_servers[server_id] = handle
        self._inflight.setdefault(server_id, 0)

    # ---- AdmissionPort ------------------------------------------------------------------------------------------

    def mask(self, slot_id: int) -> None:
        self._admitted.discard(slot_id)
        self.remove_servers([sid for sid, slot in self._slot_of.items() if slot == slot_id])

    def admit(self, slot_id: int) -> None:
        self._admitted.add(slot_id)
        self.add_servers({sid: self._all_servers[sid] for sid, slot in self._slot_of.items() if slot == slot_id})
        # A server that comes back may still have requests of its earlier life to be released.
        self._inflight_requests.update(
            {sid: self._inflight[sid] for sid, slot in self._slot_of.items() if slot == slot_id}
        )
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def queued(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    def inflight(self) -> Mapping[int, int]:
        counts: dict[int, int] = {}
        for server_id, count in self._inflight.items():
            slot_id = self._slot_of[server_id]
            counts[slot_id] = counts.get(slot_id, 0) + count
        return counts

    def slot_of_request(self, request_id: str) -> int | None:
        """Slot that the request was last given to."""
        server_id = self._request_id_to_server.get(request_id)
        return None if server_id is None else self._slot_of.get(server_id)

    # ---- verl's protocol ----------------------------------------------------------------------------------------

    async def acquire(self, request_id: str) -> tuple[str, Any]:
        """A server for ``request_id``; waits while no slot is admitted."""
        while not self._inflight_requests:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            if self.on_demand is not None:
                self.on_demand()
            await waiter
        server_id, handle = super().acquire_server(request_id)
        self._inflight[server_id] += 1
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        if self._inflight.get(server_id, 0) > 0:
            self._inflight[server_id] -= 1
