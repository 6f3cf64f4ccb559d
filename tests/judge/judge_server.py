"""A judge server on loopback that misbehaves as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Step = Callable[["MisbehavingJudge", web.Request], Any]


@dataclass
class MisbehavingJudge:
    """Answers the n-th chat request as the n-th step says, and every later one as the last step says."""

    steps: list[Step] = field(default_factory=list)
    model_steps: list[Step] = field(default_factory=list)
    chats: list[dict[str, Any]] = field(default_factory=list)
    raw_chats: list[bytes] = field(default_factory=list)
    model_requests: int = 0
    address: str = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.raw_chats.append(body)
        self.chats.append(json.loads(body))
        step = self.steps[min(len(self.chats), len(self.steps)) - 1]
        return await step(self, request)

    async def models(self, request: web.Request) -> web.StreamResponse:
        self.model_requests += 1
        if self.model_steps:
            return await self.model_steps[min(self.model_requests, len(self.model_steps)) - 1](self, request)
        return web.json_response({"object": "list", "data": [{"id": "/models/judge"}]})


def says(text: str | None, finish_reason: str = "stop") -> Step:
    async def step(judge: MisbehavingJudge, request: web.Request) -> web.StreamResponse:
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"message": message, "finish_reason": finish_reason}]})

    return step


def replies(body: str, status: int = 200, headers: dict[str, str] | None = None) -> Step:
    async def step(judge: MisbehavingJudge, request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, headers=headers, content_type="application/json")

    return step


def hangs(seconds: float, then: Step) -> Step:
    async def step(judge: MisbehavingJudge, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await then(judge, request)

    return step


async def drops(judge: MisbehavingJudge, request: web.Request) -> web.StreamResponse:
    """Closes the connection without a word."""
    request.transport.close()
    return web.Response()


async def tears(judge: MisbehavingJudge, request: web.Request) -> web.StreamResponse:
    """Promises a long reply and closes the connection in the middle of it."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response
