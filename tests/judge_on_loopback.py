"""Serves a fake judge on loopback, for tests of whatever asks one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_pivot.judge.sessions import close_session


@asynccontextmanager
async def serving(judge: Any) -> AsyncIterator[None]:
    """Routes requests to ``judge.chat`` and ``judge.models`` and sets ``judge.address`` to ``host:port``."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.chat)
    app.router.add_get("/v1/models", judge.models)
    server = TestServer(app, host="127.0.0.1", shutdown_timeout=0.1)
    await server.start_server()
    judge.address = f"127.0.0.1:{server.port}"
    yield
    await close_session()
    await server.close()
