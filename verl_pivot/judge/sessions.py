"""One HTTP session per event loop, shared by all judge clients of the process."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field

import aiohttp

KEEPALIVE_S = 4.0
"""Shorter than the five seconds after which uvicorn drops an idle connection, so that none is used as it goes."""


@dataclass
class LoopState:
    """What belongs to one event loop: its session and what is known of each router."""

    session: aiohttp.ClientSession
    models: dict[str, str] = field(default_factory=dict)
    """Router address -> name of the model it serves."""
    asking: dict[str, asyncio.Lock] = field(default_factory=dict)
    """Router address -> held while its model is asked for."""


_states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopState] = weakref.WeakKeyDictionary()


def state_of_running_loop() -> LoopState:
    """The running loop's state, made on first use. Must be called from a coroutine.

    The session ignores proxies from the environment (the router is inside the cluster), sets no time limit (each
    request brings its own) and does not bound connections (demand should queue in the router, where it is seen).
    """
    loop = asyncio.get_running_loop()
    state = _states.get(loop)
    if state is None or state.session.closed:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None)
        state = LoopState(aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False))
        _states[loop] = state
    return state


async def close_session() -> None:
    """Close the running loop's session; a later request opens a new one. For short-lived loops."""
    state = _states.pop(asyncio.get_running_loop(), None)
    if state is not None:
        await state.session.close()
