"""How many more tokens will this sequence run? Online, with bounded memory, as quantiles.

Fed where sequences begin, grow and end (the control plane of a run, or the simulator); asked when a snapshot is made.
Four sources: the tokens a sequence has so far, its siblings' lengths, the prompt's own history in earlier epochs, and
the level of lengths at present, which drifts as training goes on. Sequences that still run are censored observations.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.ended_lengths import EndedLength, EndedLengths, Siblings
from verl_pivot.core.prompt_effects import Evidence, Expected, Spread, SpreadEstimate, for_new, leave_one_out
from verl_pivot.core.survival import SurvivalCurve

Vector = NDArray[np.float64]

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles that a snapshot carries for each sequence."""

_ASSUMED = Spread(effect=0.6, residual=0.6)
"""Before anything was seen; responses of reasoning models vary about as much between prompts as within them."""
_GOLDEN = 0.6180339887498949
_SILVER = 0.4142135623730951
MAX_IDLE_GROUPS = 4096
"""Groups of which nothing runs that may wait for siblings to begin; in a failed group some never do."""
_PSEUDO = 32
"""Observations of the normal shape that a new curve starts with."""


@dataclass
class _Group:
    """Responses to one prompt of one batch."""

    prompt: Hashable
    expected: int
    """Responses that the group will have."""
    running: dict[Hashable, None] = field(default_factory=dict)
    """In the order in which they began: sets would add up in another order in every process."""
    ended: list[float] = field(default_factory=list)
    """Log lengths."""


@dataclass
class _Sequence:
    group: Hashable
    tokens: int = 0
    birth: int = 0


class LengthPredictor:
    """Predicts the remaining tokens of sequences of one role.

    Holds one entry for each running sequence and open group, at most ``window`` ended observations and at most
    ``max_prompts`` prompt histories (the longest unseen goes first).
    """

    def __init__(self, max_tokens: int, *, window: int = 2048, max_prompts: int = 100_000) -> None:
        """``max_tokens``: the budget at which a response is cut off. Raises ValueError unless it is 1 or more."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: it must be 1 or more")
        self._max_tokens = max_tokens
        self._window = window
        self._max_prompts = max_prompts
        self._sequences: dict[Hashable, _Sequence] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._history: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """Prompt -> effect and its variance when last seen."""
        self._ended = EndedLengths(window)
        self._births = 0
        self._spread = SpreadEstimate(_ASSUMED)
        self._level = math.log(max(1.0, max_tokens / 4))
        self._curve = _normal_curve()
        self._stale = 0
        self._change = 0.25
        """Variance by which a prompt's effect changes from one epoch to the next, over the variance between prompts."""

    def start(self, sequence: Hashable, group: Hashable, prompt: Hashable, siblings: int) -> None:
        """A sequence begins. ``siblings``: responses its group will have in all, itself included."""
        self.cancel(sequence)  # known under this name already: that one will not be heard of again
        self._births += 1
        self._sequences[sequence] = _Sequence(group, 0, self._births)
        known = self._groups.setdefault(group, _Group(prompt, siblings))
        known.running[sequence] = None
        known.expected = max(known.expected, len(known.running) + len(known.ended))
        if len(self._groups) > len(self._sequences) + MAX_IDLE_GROUPS:
            for idle in [key for key, other in self._groups.items() if not other.running][: MAX_IDLE_GROUPS // 2]:
                self._close(idle)

    def progress(self, tokens: Mapping[Hashable, int]) -> None:
        """Tokens generated so far, by sequence; unknown sequences are ignored."""
        for sequence, count in tokens.items():
            known = self._sequences.get(sequence)
            if known is not None:
                known.tokens = count

    def finish(self, sequence: Hashable, tokens: int) -> None:
        """A sequence ended with ``tokens`` tokens; at ``max_tokens`` it was cut off and might have gone on."""
        known = self._sequences.get(sequence)
        if known is None:
            return
        length = math.log(max(1, tokens))
        group = self._groups[known.group]
        group.running.pop(sequence, None)
        siblings = Siblings(
            self._prior(group.prompt),
            len(group.ended),
            sum(group.ended) - len(group.ended) * self._level,
            [self._sequences[other].tokens for other in group.running],
            self._level,
            self._spread.spread().residual,
        )
        self._ended.add(known.birth, length, tokens >= self._max_tokens, siblings)
        del self._sequences[sequence]
        group.ended.append(length)
        if len(group.ended) >= group.expected and not group.running:
            self._close(known.group)
        self._stale += 1
        if self._stale >= max(16, len(self._ended) // 16):
            self._refit()

    def cancel(self, sequence: Hashable) -> None:
        """A sequence will never end; what it reached says nothing more."""
        known = self._sequences.pop(sequence, None)
        if known is None:
            return
        group = self._groups[known.group]
        group.running.pop(sequence, None)
        group.expected -= 1
        if len(group.ended) >= group.expected and not group.running:
            self._close(known.group)

    def remaining(self, sequences: Iterable[Hashable], levels: tuple[float, ...] = LEVELS) -> Vector:
        """Remaining tokens [n, len(levels)] of running sequences, never beyond the budget. KeyError on unknown."""
        asked = list(sequences)
        if not asked:
            return np.empty((0, len(levels)))
        return self._ahead(asked, np.asarray(levels))

    def spread(self, sequences: Iterable[Hashable], draws: int = 5) -> tuple[Vector, Vector]:
        """``draws`` stratified values of remaining tokens for each sequence [n, draws], which together are spread as
        the lengths will be, the longest included: no single level says how long the longest of many runs. And for each
        the level [n] of a draw of its own, the same as long as it runs, so that what is planned with it is no noise."""
        asked = list(sequences)
        if not asked:
            return np.empty((0, draws)), np.empty(0)
        births = np.array([self._sequences[sequence].birth for sequence in asked], dtype=np.float64)
        own = np.modf(births * _GOLDEN)[0]
        strata = (np.arange(draws)[None, :] + np.modf(births * _SILVER)[0][:, None]) / draws
        return self._ahead(asked, strata), own

    def _ahead(self, asked: list[Hashable], levels: Vector) -> Vector:
        tokens = np.array([self._sequences[sequence].tokens for sequence in asked], dtype=np.float64)
        reached = np.log(np.maximum(tokens, 1.0))
        expected = self._expected(asked, reached)
        return self._beyond(expected, reached, tokens, levels)

    def total_of_new(self, prompts: Iterable[Hashable], levels: tuple[float, ...] = LEVELS) -> Vector:
        """Tokens [n, len(levels)] of responses to ``prompts`` that have not begun, by the prompts' history."""
        priors = np.array([self._prior(prompt) for prompt in prompts]).reshape(-1, 2)
        nothing = np.zeros(len(priors))
        evidence = Evidence(priors[:, 0], priors[:, 1], nothing, nothing)
        expected = for_new(evidence, np.arange(len(priors)), self._level, self._spread.spread())
        return self._beyond(expected, np.full(len(priors), -np.inf), nothing, np.asarray(levels))

    def _beyond(self, expected: Expected, reached: Vector, tokens: Vector, levels: Vector) -> Vector:
        z = np.maximum((reached - expected.mean) / expected.deviation, self._curve.knots[0])
        quantiles = self._curve.quantiles_beyond(z, levels)
        totals = np.exp(np.minimum(expected.mean[:, None] + expected.deviation[:, None] * quantiles, 50.0))
        budget = np.maximum(self._max_tokens - tokens[:, None], 0.0)
        return np.asarray(np.minimum(np.maximum(totals - tokens[:, None], 1.0), budget))

    def _expected(self, sequences: list[Hashable], reached: Vector) -> Expected:
        """Expected log lengths of ``sequences``, whose own progress is taken to be ``reached``, not what is known."""
        order = list(dict.fromkeys(self._sequences[sequence].group for sequence in sequences))
        rows = {group: row for row, group in enumerate(order)}
        groups = [self._groups[group] for group in order]
        members = [member for group in groups for member in group.running]
        position = {member: place for place, member in enumerate(members)}
        at = np.array([max(1, self._sequences[member].tokens) for member in members], dtype=np.float64)
        logs = np.log(at)
        places = np.array([position[sequence] for sequence in sequences])
        logs[places] = reached
        priors = np.array([self._prior(group.prompt) for group in groups])
        evidence = Evidence(
            priors[:, 0],
            priors[:, 1],
            np.array([sum(group.ended) - len(group.ended) * self._level for group in groups]),
            np.array([float(len(group.ended)) for group in groups]),
        )
        index = np.array([rows[self._sequences[member].group] for member in members])
        everyone = leave_one_out(evidence, index, logs, self._level, self._spread.spread())
        return Expected(everyone.mean[places], everyone.deviation[places])

    def _prior(self, prompt: Hashable) -> tuple[float, float]:
        """Mean and variance of a prompt's effect before its present group says anything."""
        variance = self._spread.spread().effect ** 2
        if prompt not in self._history:
            return 0.0, variance
        effect, known = self._history[prompt]
        known = known + self._change * variance
        weight = variance / (variance + known)
        return effect * weight, variance * known / (variance + known)

    def _close(self, key: Hashable) -> None:
        """A group is complete: what it says of the spread, and of its prompt, is kept."""
        group = self._groups.pop(key)
        if not group.ended:
            return
        deviations = np.array(group.ended) - self._level
        self._spread.add_group(deviations)
        spread = self._spread.spread()
        effect, noise = float(deviations.mean()), spread.residual**2 / len(deviations)
        if group.prompt in self._history:
            then, known = self._history[group.prompt]
            changed = ((effect - then) ** 2 - noise - known) / spread.effect**2
            self._change = max(0.01, self._change + 0.01 * (min(changed, 4.0) - self._change))
        self._history[group.prompt] = (effect, noise)
        self._history.move_to_end(group.prompt)
        while len(self._history) > self._max_prompts:
            self._history.popitem(last=False)

    def _refit(self) -> None:
        """Level and shape anew, from the ``window`` sequences that began last, ended or not: those that ended alone
        would be the short ones."""
        self._stale = 0
        oldest = self._births - self._window
        ended = self._ended.all()
        recent = [entry for entry in ended if entry.birth > oldest] or ended
        running = [name for name, known in self._sequences.items() if known.birth > oldest and known.tokens > 1]
        reached = np.log(np.array([self._sequences[name].tokens for name in running], dtype=np.float64))
        if len(recent) >= 8:
            whole = np.array([entry.length for entry in recent if not entry.cut])
            cut = np.array([entry.length for entry in recent if entry.cut])
            self._level = _censored_mean(whole, np.concatenate([cut, reached]))
        z_running = np.empty(0)
        if running:
            expected = self._expected(running, reached)
            z_running = (reached - expected.mean) / expected.deviation
        z_ended = np.array([entry.z for entry in recent if not entry.cut])
        z_cut = np.array([entry.z for entry in recent if entry.cut])
        self._curve = SurvivalCurve.fit(np.concatenate([_PRIOR_Z, z_ended]), np.concatenate([z_cut, z_running]))

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with: everything learned, nothing of what is running. JSON with text keys."""
        return {
            "spread": self._spread.state(),
            "level": self._level,
            "change": self._change,
            "births": self._births,
            "ended": [list(entry) for entry in self._ended.all()],
            "history": [[prompt, *known] for prompt, known in self._history.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with ``state``."""
        self._spread.load(state["spread"])
        self._level = float(state["level"])
        self._change = float(state["change"])
        self._births = int(state["births"])
        self._ended.extend(EndedLength(int(b), float(y), float(z), bool(cut)) for b, y, z, cut in state["ended"])
        for prompt, effect, variance in state["history"]:
            key = tuple(prompt) if isinstance(prompt, list) else prompt  # JSON knows no tuples
            self._history[key] = (float(effect), float(variance))
        self._refit()


def _censored_mean(ended: Vector, running: Vector) -> float:
    """Mean under censoring: the area under the curve."""
    if len(ended) < 2:
        return float(np.mean(np.concatenate([ended, running])))
    curve = SurvivalCurve.fit(ended, running)
    levels = (np.arange(64) + 0.5) / 64
    return float(np.mean(curve.inverse(-np.log1p(-levels))))


def _prior_z() -> Vector:
    from scipy.special import ndtri

    return np.asarray(ndtri((np.arange(_PSEUDO) + 0.5) / _PSEUDO), dtype=np.float64)


_PRIOR_Z = _prior_z()


def _normal_curve() -> SurvivalCurve:
    return SurvivalCurve.fit(_PRIOR_Z, np.empty(0))
