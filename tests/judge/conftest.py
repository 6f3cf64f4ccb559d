from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from judge_on_loopback import serving
from judge_server import MisbehavingJudge


@pytest.fixture
async def judge() -> AsyncIterator[MisbehavingJudge]:
    judge = MisbehavingJudge()
    async with serving(judge):
        yield judge


@pytest.fixture
def closed_port() -> int:
    """A port on loopback where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
