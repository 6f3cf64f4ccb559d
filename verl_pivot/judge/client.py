"""The judge client: one response in, one score out, whatever the road is like.

Used inside a verl custom reward function, in verl's reward loop worker processes, where many scores are awaited at
once on one event loop. It speaks to the router whose address verl hands to the function; behind that router judges
may sleep, wake and die while a run goes on, so an answer may take long or need another try.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_pivot.judge.exchange import Backoff, ExchangeError, exchange
from verl_pivot.judge.parsers import ParseScore
from verl_pivot.judge.sessions import LoopState, state_of_running_loop

Messages = list[dict[str, Any]]
Outcome = Literal["scored", "unparsed", "rejected", "unreachable", "deadline"]
"""``scored``; ``unparsed``: no verdict in what the judge wrote; ``rejected``: an error that would come back the same;
``unreachable``: out of retries; ``deadline``: out of time."""


@dataclass(frozen=True)
class JudgeResult:
    """What became of one request."""

    score: float
    verdict_text: str
    """What the judge wrote last; empty when it never answered."""
    attempts: int
    """Chat requests sent."""
    seconds: float
    outcome: Outcome


class JudgeError(RuntimeError):
    """The judge gave no score and no default is configured for this outcome."""

    def __init__(self, message: str, outcome: Outcome, attempts: int, verdict_text: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.attempts = attempts
        self.verdict_text = verdict_text


@dataclass
class _Request:
    """Progress of one score."""

    started_s: float
    deadline_s: float
    attempts: int = 0
    failures: int = 0
    unparsed: int = 0
    verdict_text: str = ""
    last_error: str = "none yet"

    def remaining_s(self) -> float:
        return self.deadline_s - time.monotonic()


class _GaveUp(Exception):
    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome


@dataclass
class JudgeClient:
    """Scores responses with the generative reward model behind ``router_address``.

    Safe to share between coroutines and event loops; holds no connection itself (they belong to the loop).
    """

    router_address: str
    """``host:port``, as verl passes it in ``reward_router_address``."""
    prompt: str | Callable[..., str | Messages]
    """A ``str.format`` template with ``{question}``, ``{response}`` and any further fields given to ``score``, or a
    callable that takes these as keywords and returns the user message or a whole list of chat messages."""
    parse_score: ParseScore
    """From the judge's text to a score; None when it holds no verdict."""
    model: str | None = None
    """Served model name; None: ask the router once (GET /v1/models)."""
    deadline_s: float = 1800.0
    """For one score, all tries and waiting included. Keep it above what the router may queue a request for."""
    attempt_s: float = 900.0
    """For one try. A try given up early goes back to the end of the router's queue."""
    retries: int = 10
    """Further tries after failed ones (connection, timeout, 5xx, 408, 425, 429, malformed reply)."""
    backoff: Backoff = field(default_factory=Backoff)
    garbage_retries: int = 1
    """Further tries when the judge's text holds no verdict."""
    garbage_temperature: float = 0.7
    """Least temperature of these tries: a greedy judge would only repeat itself."""
    default_score: float | None = None
    """Score when the verdict stays unreadable; None: JudgeError."""
    unavailable_score: float | None = None
    """Score when no answer comes at all; None: JudgeError. A number here trains on rewards nobody gave."""
    temperature: float = 0.0
    max_tokens: int = 512
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, e.g. ``{"chat_template_kwargs": {"enable_thinking": False}}``."""
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """How often each outcome and each kind of retry (``retry``, ``garbage_retry``) occurred in this client."""

    def __post_init__(self) -> None:
        self.router_address = self.router_address.removeprefix("http://").rstrip("/")
        if not self.router_address or "://" in self.router_address:
            raise ValueError(f"JudgeClient: router_address must be host:port, not {self.router_address!r}")
        if isinstance(self.prompt, str) and "{response}" not in self.prompt:
            raise ValueError("JudgeClient: the prompt template has no {response}; the judge would see nothing to grade")
        for name, least in (("deadline_s", 1e-3), ("attempt_s", 1e-3), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"JudgeClient: {name} must be at least {least} (got {getattr(self, name)})")
        for name in ("retries", "garbage_retries", "temperature", "garbage_temperature"):
            if getattr(self, name) < 0:
                raise ValueError(f"JudgeClient: {name} must not be negative (got {getattr(self, name)})")
        self._rng = random.Random()

    async def score(self, question: str, response: str, **fields: Any) -> JudgeResult:
        """Have ``response`` to ``question`` judged; ``fields`` fill further places of the prompt.

        Raises JudgeError when there is no score and no default for the case, ValueError when the prompt template
        needs a field that was not given.
        """
        messages = self._messages(question, response, fields)
        started_s = time.monotonic()
        request = _Request(started_s, started_s + self.deadline_s)
        state = state_of_running_loop()
        try:
            score = await asyncio.wait_for(self._until_scored(state, messages, request), self.deadline_s)
            outcome: Outcome = "scored"
            self.counts[outcome] += 1
        except TimeoutError:
            outcome = "deadline"
            score = self._fallback(outcome, f"no verdict within deadline_s={self.deadline_s}", request)
        except _GaveUp as gave_up:
            outcome = gave_up.outcome
            score = self._fallback(outcome, str(gave_up), request)
        seconds = time.monotonic() - started_s
        return JudgeResult(score, request.verdict_text, request.attempts, seconds, outcome)

    async def _until_scored(self, state: LoopState, messages: Messages, request: _Request) -> float:
        model = self.model or await self._served_model(state, request)
        while True:
            payload = self._payload(model, messages, garbled=request.unparsed > 0)
            request.attempts += 1
            try:
                reply = await self._exchange(state, "POST", "v1/chat/completions", payload, request)
                text, cut_off = _reply_text(reply)
            except ExchangeError as error:
                if not error.retryable:
                    state.models.pop(self.router_address, None)  # the name may be what was refused: ask anew next time
                await self._wait_or_give_up(error, request)
                continue
            request.failures = 0
            request.verdict_text = text
            score = self.parse_score(text)
            if score is not None:
                return float(score)
            request.unparsed += 1
            if request.unparsed > self.garbage_retries:
                hint = f"; it was cut off at max_tokens={self.max_tokens}" if cut_off else ""
                raise _GaveUp("unparsed", f"{request.unparsed} replies without a verdict{hint}")
            self.counts["garbage_retry"] += 1

    async def _served_model(self, state: LoopState, request: _Request) -> str:
        """The first model that the router lists. Coroutines that ask at the same time wait for one answer."""
        lock = state.asking.setdefault(self.router_address, asyncio.Lock())
        async with lock:
            while self.router_address not in state.models:
                try:
                    reply = await self._exchange(state, "GET", "v1/models", None, request)
                    state.models[self.router_address] = _first_model(reply)
                except ExchangeError as error:
                    await self._wait_or_give_up(error, request)
        request.failures = 0
        return state.models[self.router_address]

    async def _exchange(
        self, state: LoopState, method: str, path: str, payload: dict[str, Any] | None, request: _Request
    ) -> dict[str, Any]:
        url = f"http://{self.router_address}/{path}"
        # The margin lets the deadline of the whole request fire first, so that it is reported as what it is.
        timeout_s = min(self.attempt_s, request.remaining_s() + 1.0)
        return await exchange(state.session, method, url, payload, timeout_s)

    async def _wait_or_give_up(self, error: ExchangeError, request: _Request) -> None:
        request.last_error = str(error)
        if not error.retryable:
            raise _GaveUp("rejected", "the request was refused") from error
        request.failures += 1
        if request.failures > self.retries:
            raise _GaveUp("unreachable", f"{request.failures} failed tries in a row") from error
        delay_s = self.backoff.delay_s(request.failures, error.retry_after_s, self._rng)
        if delay_s >= request.remaining_s():
            raise _GaveUp("deadline", f"the next try would be after deadline_s={self.deadline_s}") from error
        self.counts["retry"] += 1
        await asyncio.sleep(delay_s)

    def _fallback(self, outcome: Outcome, reason: str, request: _Request) -> float:
        self.counts[outcome] += 1
        default = self.default_score if outcome == "unparsed" else self.unavailable_score
        if default is not None:
            return default
        said = f", the judge wrote {request.verdict_text[-200:]!r}" if request.verdict_text else ""
        message = (
            f"judge at {self.router_address}: {reason} "
            f"({request.attempts} attempts, {time.monotonic() - request.started_s:.1f} s, "
            f"last error: {request.last_error}{said})"
        )
        raise JudgeError(message, outcome, request.attempts, request.verdict_text)

    def _messages(self, question: str, response: str, fields: Mapping[str, Any]) -> Messages:
        if callable(self.prompt):
            content = self.prompt(question=question, response=response, **fields)
        else:
            try:
                content = self.prompt.format(question=question, response=response, **fields)
            except (KeyError, IndexError) as error:
                raise ValueError(
                    f"JudgeClient: the prompt template needs a field {error} that score() was not given; "
                    "write literal braces as {{ and }}"
                ) from error
        return [{"role": "user", "content": content}] if isinstance(content, str) else content

    def _payload(self, model: str, messages: Messages, garbled: bool) -> dict[str, Any]:
        temperature = max(self.temperature, self.garbage_temperature) if garbled else self.temperature
        settings = {"temperature": temperature, "max_tokens": self.max_tokens, **self.extra_body}
        return {"model": model, "messages": messages, **settings}


def _reply_text(reply: dict[str, Any]) -> tuple[str, bool]:
    """The judge's text and whether it was cut off; a reasoning judge that never came to an answer wrote ''."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] or ""
        if not isinstance(text, str):
            raise TypeError(f"content is {type(text).__name__}")
        return text, choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ExchangeError(f"not a chat completion: {str(reply)[:300]}", retryable=True) from error


def _first_model(reply: dict[str, Any]) -> str:
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ExchangeError(f"no model listed: {str(reply)[:300]}", retryable=True) from error
