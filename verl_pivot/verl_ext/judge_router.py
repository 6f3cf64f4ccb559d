"""The judge's HTTP router: verl's address and OpenAI-compatible API, with judges that come and go.

Runs inside the control-plane actor. A request waits while no judge is admitted, up to a deadline, and is sent again
when its judge leaves in the middle. Subclasses verl/experimental/reward_loop/router/naive_router.py:83.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import aiohttp
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from verl.experimental.reward_loop.router.naive_router import NaiveRouter

from verl_pivot.config.schema import JudgeConfig
from verl_pivot.runtime.admission import AdmissionQueue

logger = logging.getLogger(__name__)


class JudgeRouter(NaiveRouter):
    """Proxies each request to the judge that the queue chooses.

    verl's own tables (``worker_urls``, ``request_counts``) stay empty: the queue holds them.
    """

    def __init__(self, config: JudgeConfig) -> None:
        # No limit on connections: what an engine gets at a time is the queue's business.
        super().__init__(worker_urls=[], max_connections=0)
        self._config = config
        self.queue = AdmissionQueue()
        self.on_suspect: Any = None
        """Awaited with (slot_id, error) when a judge engine could not be reached or failed; when it returns, the
        engine has answered for itself or its slot is out of service."""
        self.resubmitted = 0
        self._resubmitted_told = 0

    def register(self, url: str, slot_id: int, limit: int, replaces: str | None = None) -> None:
        """Make a judge server known under ``url`` (``replaces`` is the address of its dead predecessor)."""
        if replaces is not None:
            self.queue.forget(replaces)
        self.queue.register(url, slot_id, limit)

    def take_resubmitted(self) -> int:
        """Requests sent again to another judge since the last call."""
        new, self._resubmitted_told = self.resubmitted - self._resubmitted_told, self.resubmitted
        return new

    # ---- proxy --------------------------------------------------------------------------------------------------

    async def _make_async_request(self, request: Request, endpoint: str) -> Response:
        """Answer one request; runs for every path, as verl's router does."""
        body = await request.body()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.queue_deadline_s
        asked_before = False
        while True:
            url = await self._acquire(deadline_s, ahead=asked_before)
            if url is None:
                return JSONResponse(
                    status_code=503,
                    headers={"Retry-After": "1"},
                    content={
                        "error": f"no judge became available within {self._config.queue_deadline_s:g} s; raise "
                        "trainer.resource_shift.judge.queue_deadline_s or give genrm a floor "
                        "(trainer.resource_shift.planner.genrm_floor)"
                    },
                )
            if await request.is_disconnected():
                self.queue.release(url)
                return Response(status_code=499)  # nobody reads it
            try:
                response = await self._forward(request.method, url, endpoint, body, headers)
            finally:
                self.queue.release(url)
            if response is not None:
                return response
            self.resubmitted += 1
            asked_before = True
            if loop.time() > deadline_s:
                return JSONResponse(status_code=503, content={"error": "every judge left while judging this request"})

    async def _forward(
        self, method: str, url: str, endpoint: str, body: bytes, headers: dict[str, str]
    ) -> Response | None:
        """Send to one judge; None when the request must go elsewhere (judge left or died)."""
        timeout = aiohttp.ClientTimeout(total=self._config.request_deadline_s)
        try:
            async with self.client.request(
                method, f"{url}/{endpoint}", data=body, headers=headers, timeout=timeout
            ) as response:
                payload = await response.read()
                if response.status >= 500:
                    await self._suspect(url, f"HTTP {response.status}: {payload[:200]!r}")
                    return _as_response(response, payload) if self.queue.is_open(url) else None
                return None if _was_aborted(payload) else _as_response(response, payload)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            await self._suspect(url, f"{type(error).__name__}: {error}")
            return None
        except TimeoutError:
            await self._suspect(url, f"no answer within {self._config.request_deadline_s:g} s")
            return JSONResponse(
                status_code=504,
                content={"error": f"the judge did not answer within {self._config.request_deadline_s:g} s"},
            )

    async def _acquire(self, deadline_s: float, ahead: bool) -> str | None:
        """A judge, or None when none had room before the deadline."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self.queue.acquire(ahead=ahead), left_s)
        except TimeoutError:
            return None

    async def _suspect(self, url: str, error: str) -> None:
        slot_id = self.queue.slot_of(url)
        logger.warning("judge on slot %s at %s: %s", slot_id, url, error)
        if slot_id is not None and self.queue.is_open(url) and self.on_suspect is not None:
            await self.on_suspect(slot_id, error)


def _was_aborted(payload: bytes) -> bool:
    """True for a completion, streamed or whole, that the engine cut off because its slot leaves."""
    if b'"abort"' not in payload:
        return False
    try:
        return any(choice.get("finish_reason") == "abort" for answer in _answers(payload) for choice in answer)
    except (ValueError, AttributeError):
        return False


def _answers(payload: bytes) -> Iterator[list[dict[str, Any]]]:
    """The choices of each JSON object in it: one, or one for each event of a stream."""
    events = [line[5:] for line in payload.splitlines() if line.startswith(b"data:")]
    for event in events or [payload]:
        if event.strip() != b"[DONE]":
            yield json.loads(event).get("choices") or []


def _as_response(response: aiohttp.ClientResponse, payload: bytes) -> Response:
    return Response(content=payload, status_code=response.status, media_type=response.content_type)
