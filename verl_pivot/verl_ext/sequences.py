"""What one engine tells of its sequences, one by one: whose they are, how far they have come, and which ended.

Lives in the engine's front end. Responses come with a key of their client's, which stays the same when they go on in
another engine. Requests over HTTP (the judge's) are known by vLLM's own id, and begin anew when they move.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_pivot.core.sequences import SequenceEnd, SequenceState

ABORTED = ("aborted", "abort")
"""What verl says of an attempt that was cut off."""
MAX_TOLD = 8192
"""Sequences in one report, and ended ones kept for the next; beyond that the newest running and the oldest ended ones
are left out."""

SAMPLED = 256
"""Tokens of a judge's prompt that its group is told from, about."""


def prompt_key(token_ids: Sequence[int]) -> str:
    """The same for equal prompts, in every process and run."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()


class SequenceBook:
    """Not thread-safe: all calls come from the front end's event loop."""

    def __init__(self) -> None:
        self._known: dict[str, SequenceState] = {}
        """By the id that the caller gave to vLLM: responses, as they were when this attempt began."""
        self._judged: dict[str, SequenceState] = {}
        """By vLLM's own id: other requests, without the tokens."""
        self._ended: deque[SequenceEnd] = deque(maxlen=MAX_TOLD)

    def begin(self, request_id: str, sequence: tuple[str, str, int, int] | None) -> None:
        """An attempt at a response arrives; None where its client does not say whose it is."""
        if sequence is not None:
            self._known[request_id] = SequenceState(*sequence)

    def end(self, request_id: str, tokens: int, is_whole: bool) -> None:
        """The attempt gave ``tokens`` tokens."""
        known = self._known.pop(request_id, None)
        if known is not None:
            self._ended.append(
                SequenceEnd(known.key, known.group, known.prompt_tokens, known.tokens + tokens, is_whole)
            )

    def lost(self, request_id: str) -> None:
        """The attempt raised: what becomes of its response is not known here."""
        self._known.pop(request_id, None)

    def on_finished(self, own_id: str, state: Any, new_tokens: int, reason: Any) -> None:
        """vLLM's engine process ended a request; ``state`` is vLLM's, before this output."""
        if state is None or _external_id(own_id, state) in self._known:
            return  # a response: its attempt is about to return
        sequence = self._judged.pop(own_id, None) or _judgement(own_id, state)
        tokens = tokens_generated(state) + new_tokens
        is_whole = str(reason) not in ("abort", "error")
        self._ended.append(SequenceEnd(sequence.key, sequence.group, sequence.prompt_tokens, tokens, is_whole))

    def report(self, states: Mapping[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
        """``sequences`` and ``ended``, as plain tuples in the order of ``SequenceState`` and ``SequenceEnd``.

        ``states``: vLLM's request states by own id. Requests over HTTP that are gone without having ended were aborted.
        """
        running = []
        judged: dict[str, SequenceState] = {}
        for own_id, state in states.items():
            tokens = tokens_generated(state)
            known = self._known.get(_external_id(own_id, state))
            if known is not None:
                running.append((known.key, known.group, known.prompt_tokens, known.tokens + tokens))
                continue
            known = judged[own_id] = self._judged.pop(own_id, None) or _judgement(own_id, state)
            running.append((known.key, known.group, known.prompt_tokens, tokens))
        self._cut_off(self._judged.values())
        self._judged = judged
        ended, self._ended = self._ended, deque(maxlen=MAX_TOLD)
        return {"sequences": running[:MAX_TOLD], "ended": [tuple(end) for end in ended]}

    def _cut_off(self, judgements: Iterable[SequenceState]) -> None:
        self._ended.extend(SequenceEnd(j.key, j.group, j.prompt_tokens, 0, False) for j in judgements)


def tokens_generated(state: Any) -> int:
    """Of one of vLLM's request states, in this attempt."""
    return len(state.detokenizer.output_token_ids) if state.detokenizer else 0


def _external_id(own_id: str, state: Any) -> str:
    return getattr(state, "external_req_id", None) or own_id


def _judgement(own_id: str, state: Any) -> SequenceState:
    """Its group is told from its length and from tokens all over its prompt: hundreds may arrive at once, and what they
    read is long."""
    tokens, length = state.prompt_token_ids or (), state.prompt_len or 0
    return SequenceState(own_id, prompt_key([length, *tokens[:: max(1, length // SAMPLED)]]), length, 0)
