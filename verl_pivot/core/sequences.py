"""What engines and the balancer tell of single sequences. Plain values: they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SequenceState(NamedTuple):
    """A sequence inside an engine, or before the engines."""

    key: str
    """The same for all attempts at one response; of a judgement, one attempt's."""
    group: str
    """Common to the responses to one prompt. Empty: it has no siblings."""
    prompt_tokens: int
    tokens: int
    """Generated in all attempts."""


class SequenceEnd(NamedTuple):
    """A sequence, or one attempt at it, that ended in an engine."""

    key: str
    group: str
    prompt_tokens: int
    tokens: int
    is_whole: bool
    """It is complete; else it was cut off there."""


@dataclass(frozen=True)
class SequenceReport:
    """What an engine tells of its sequences."""

    running: tuple[SequenceState, ...] = ()
    """In the engine now, decoding or waiting."""
    ended: tuple[SequenceEnd, ...] = ()
    """Since the last report."""
