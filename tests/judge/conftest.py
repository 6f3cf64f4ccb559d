from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from judge_server import MisbehavingJudge

from verl_pivot.judge.sessions import close_session


@pytest.fixture
async def judge() -> AsyncIterator[MisbehavingJudge]:
    judge = MisbehavingJudge()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.chat)
    app.router.add_get("/v1/models", judge.models)
    server = TestServer(app, host="127.0.0.1", shutdown_timeout=0.1)
    await server.start_server()
    judge.address = f"127.0.0.1:{server.port}"
    yield judge
    await close_session()
    await server.close()


@pytest.fixture
def closed_port() -> int:
    """A port on loopback where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
