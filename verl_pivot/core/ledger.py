"""Which sequences of a role are open, matched over engines, moves and queues: each begins once and ends once.

Engines and the balancer tell what they hold; a sequence that moves is told by one engine, then by none, then by
another. The ledger feeds the forecast of its role. Time comes in as an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from verl_pivot.core.forecast import Observation, RoleForecast
from verl_pivot.core.sequences import SequenceEnd, SequenceState

UNSEEN_S = 60.0
"""A sequence that nobody has told of for so long will not come back: its client gave it up."""
MAX_REMEMBERED = 50_000
"""Sequences that ended of which the ledger still knows that they did: what engines tell may be a little old."""


class SequenceLedger:
    """The open sequences of one role.

    Args:
        forecast: told what begins and ends.
        goes_on: whether a sequence that is cut off goes on elsewhere under its key; else it begins again as another.
        max_tokens: a sequence of so many tokens has ended, whoever ended it.
    """

    def __init__(self, forecast: RoleForecast, *, goes_on: bool, max_tokens: int) -> None:
        self._forecast = forecast
        self._goes_on = goes_on
        self._max_tokens = max_tokens
        self._open: dict[str, Observation] = {}
        self._seen_s: dict[str, float] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._born: dict[str, int] = {}
        """Group -> policy version when it was first seen, for groups that were open at the last look."""
        self.begun = 0
        self.whole = 0
        self.cut_off = 0
        """For good. ``begun`` is the sum of these two and what is open."""

    def __len__(self) -> int:
        return len(self._open)

    def counts(self) -> dict[str, int]:
        """``begun``, and what became of them: ``whole``, ``cut_off`` for good, still ``open``."""
        return {"begun": self.begun, "whole": self.whole, "cut_off": self.cut_off, "open": len(self._open)}

    def observe(self, states: Iterable[SequenceState], version: int, now_s: float) -> None:
        """Sequences that somebody holds at this moment."""
        for state in states:
            if state.key in self._open:
                self._open[state.key] = self._open[state.key]._replace(generated_tokens=state.tokens)
            elif state.key in self._over:
                continue
            else:
                self._begin(state, version)
            self._seen_s[state.key] = now_s

    def end(self, ends: Iterable[SequenceEnd], version: int, now_s: float) -> None:
        """What ended in engines. Of what was cut off and goes on, only the tokens are noted."""
        for end in ends:
            if end.key in self._over:
                continue
            is_whole = end.is_whole or end.tokens >= self._max_tokens
            if not is_whole and end.key not in self._open:
                continue
            if not is_whole and self._goes_on:
                self.observe([SequenceState(*end[:4])], version, now_s)
                continue
            if end.key not in self._open:
                self._begin(SequenceState(*end[:4]), version)
            self._close(end.key, end.tokens if is_whole else None)

    def give_up_unseen(self, now_s: float) -> None:
        """What nobody has told of for long was cut off for good."""
        for key in [key for key, seen_s in self._seen_s.items() if now_s - seen_s > UNSEEN_S]:
            self._close(key, None)

    def observations(self) -> list[Observation]:
        """All that are open."""
        groups = {observation.group for observation in self._open.values()}
        self._born = {group: version for group, version in self._born.items() if group in groups}
        return list(self._open.values())

    def born(self, group: str) -> int:
        """Policy version at which an open group was first seen."""
        return self._born[group]

    def _begin(self, state: SequenceState, version: int) -> None:
        group = state.group or state.key
        observation = Observation(state.key, group, group, state.prompt_tokens, state.tokens)
        self._open[state.key] = observation
        self._born.setdefault(group, version)
        self._forecast.begin([observation], siblings=None if state.group else 1)
        self.begun += 1

    def _close(self, key: str, tokens: int | None) -> None:
        """``tokens``: of a whole one; None for one that was cut off."""
        del self._open[key]
        self._seen_s.pop(key, None)
        self._over[key] = None
        while len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)
        if tokens is None:
            self._forecast.cancel(key)
            self.cut_off += 1
        else:
            self._forecast.end(key, tokens)
            self.whole += 1
