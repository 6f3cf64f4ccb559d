"""One HTTP exchange with the judge's router, and whether it is worth another try."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

RETRIED_STATUSES = frozenset({408, 425, 429})
"""Client errors that pass with time; every other 4xx would come back the same."""


class ExchangeError(Exception):
    """An exchange that gave no usable reply."""

    def __init__(self, message: str, retryable: bool, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before another try: doubling from ``first_s`` up to ``cap_s``, less up to half at random."""

    first_s: float = 0.25
    cap_s: float = 10.0

    def delay_s(self, failures: int, retry_after_s: float | None, rng: random.Random) -> float:
        """After ``failures`` (>= 1) tries in a row. A server's Retry-After is a lower bound."""
        delay_s = min(self.cap_s, self.first_s * 2.0 ** min(failures - 1, 30)) * rng.uniform(0.5, 1.0)
        return max(delay_s, retry_after_s or 0.0)


async def exchange(
    session: aiohttp.ClientSession, method: str, url: str, payload: dict[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    """Send one request and return the JSON object that comes back.

    Raises ExchangeError: retryable for broken connections, timeouts, 5xx and the like, and for replies that are no
    JSON object; not retryable for other 4xx.
    """
    body = None if payload is None else encode(payload)
    headers = {} if body is None else {"Content-Type": "application/json; charset=utf-8"}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
            content = await response.read()
    except TimeoutError as error:
        raise ExchangeError(f"no reply within {timeout_s:.1f} s", retryable=True) from error
    except aiohttp.InvalidURL as error:
        raise ExchangeError(f"not a usable URL: {url}", retryable=False) from error
    except (aiohttp.ClientError, OSError) as error:
        raise ExchangeError(f"{type(error).__name__}: {error}", retryable=True) from error
    if response.status != 200:
        raise _refused(response, content)
    try:
        reply = json.loads(content)
    except ValueError as error:
        raise ExchangeError(f"the reply is not JSON: {_start(content)}", retryable=True) from error
    if not isinstance(reply, dict):
        raise ExchangeError(f"the reply is not a JSON object: {_start(content)}", retryable=True)
    return reply


def encode(payload: dict[str, Any]) -> bytes:
    """UTF-8 JSON. Lone surrogates, which no server accepts, become U+FFFD; pairs of them become their character."""
    text = json.dumps(payload, ensure_ascii=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")


def _refused(response: aiohttp.ClientResponse, content: bytes) -> ExchangeError:
    status = response.status
    retryable = not 400 <= status < 500 or status in RETRIED_STATUSES
    return ExchangeError(f"HTTP {status}: {_start(content)}", retryable, _retry_after_s(response))


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """Seconds from the Retry-After header; its date form is not worth reading between machines of one cluster."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < float("inf") else None


def _start(content: bytes) -> str:
    return content[:300].decode("utf-8", "replace")
