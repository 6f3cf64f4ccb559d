"""What is left to generate and to judge, predicted from sequences as they are observed: backlogs for a snapshot.

Fed with what begins and ends, and asked with all that is open at a moment. The controller of a run and the simulator
make what planners see of lengths with this, and neither ever tells it how long a sequence will be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from verl_pivot.core.backlog import Backlog, GroupBacklog, Mask, Vector
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role

REFRESH_S = 4.0
"""Between two predictions; what was predicted is good for longer than a plan."""
_OPEN_PER_S = 4000.0
"""Open sequences for which looking once a second takes about a hundredth of it."""
_NEW = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
_PROMPTS = 1000
"""Of which the mean is kept."""
_OTHER = 997
"""Makes another chance of one, as good as independent of it."""


class Observation(NamedTuple):
    """One sequence at one moment."""

    key: Hashable
    """The same for as long as the sequence lives, wherever it runs."""
    group: Hashable
    """Common to all responses to one prompt of one batch."""
    prompt: Hashable
    """The same whenever this prompt comes again."""
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, eq=False)
class Seen:
    """One role's open sequences; arrays in the order in which they were given."""

    backlog: Backlog
    drawn: Vector
    """Tokens that each has left: one draw of what is likely, the same as long as it runs."""
    chance: Vector
    """A number from 0 to 1 for each, for a draw of what comes after it."""


class RoleForecast:
    """Predicts what is left of one inference role.

    Args:
        predictor: learns the lengths of this role.
        siblings: responses of one group.
        prompt_tokens: of a request, before many were seen; None: as the first ones have.
        factor: makes it wrong on purpose: lengths come out that many times too long.
    """

    def __init__(
        self, predictor: LengthPredictor, siblings: int, prompt_tokens: float | None = None, factor: float = 1.0
    ) -> None:
        self._predictor = predictor
        self._siblings = siblings
        self.prompt_tokens = prompt_tokens or 0.0
        """Of one request, on average."""
        self._prompts = 0 if prompt_tokens is None else _PROMPTS
        self._factor = factor

    @property
    def siblings(self) -> int:
        return self._siblings

    def begin(self, sequences: Iterable[Observation], siblings: int | None = None) -> None:
        """``siblings``: where their groups have another size than most."""
        for sequence in sequences:
            self._predictor.start(sequence.key, sequence.group, sequence.prompt, siblings or self._siblings)
            self._prompts = min(self._prompts + 1, _PROMPTS)
            self.prompt_tokens += (sequence.prompt_tokens - self.prompt_tokens) / self._prompts

    def end(self, key: Hashable, tokens: int) -> None:
        """A sequence ended with ``tokens`` tokens in all."""
        self._predictor.finish(key, tokens)

    def cancel(self, key: Hashable) -> None:
        """A sequence was cut off for good."""
        self._predictor.cancel(key)

    def look(self, sequences: Sequence[Observation], unseen: int = 0) -> Seen:
        """What is left of open sequences.

        Args:
            sequences: all that have begun and not ended.
            unseen: further requests, of which nothing else is known; they are in the backlog alone.
        """
        self._predictor.progress({sequence.key: sequence.generated_tokens for sequence in sequences})
        spread, own = self._predictor.spread([sequence.key for sequence in sequences])
        spread = spread * self._factor
        drawn = spread[np.arange(len(own)), (own * spread.shape[1]).astype(int)]
        new = self._predictor.total_of_new([None], _NEW)[0] * self._factor
        # Each gets half of the quantiles of a new one, in turns.
        waiting = np.resize(new.reshape(-1, 2).T, (unseen, len(new) // 2))
        unread = unseen * self.prompt_tokens + sum(s.prompt_tokens for s in sequences if not s.generated_tokens)
        backlog = Backlog.of(np.concatenate([spread, waiting]), new, self.prompt_tokens, unread)
        return Seen(backlog, drawn, np.modf(own * _OTHER)[0])

    def draw_new(self, prompts: Sequence[Hashable], chance: Vector) -> Vector:
        """Tokens of requests that have not begun, to ``prompts`` [n], at the quantiles ``chance`` [n]."""
        asked = list(dict.fromkeys(prompts))
        rows = {prompt: row for row, prompt in enumerate(asked)}
        quantiles = self._predictor.total_of_new(asked, _NEW)
        at = np.array([rows[prompt] for prompt in prompts], dtype=int)
        return np.asarray(quantiles[at, (chance * len(_NEW)).astype(int)] * self._factor)

    def longest_of_new(self, count: float) -> float:
        """Tokens of the longest of ``count`` requests that have not begun, in the median."""
        level = 0.5 ** (1 / max(1.0, count))
        return float(self._predictor.total_of_new([None], (level,))[0, 0]) * self._factor

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with. JSON with text keys."""
        return self._predictor.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._predictor.load(state)


class Forecast:
    """Both roles, and the groups that their sequences make.

    Looks again after ``refresh_s``, and later where very many sequences are open: ``REFRESH_S`` at most.
    """

    def __init__(self, roles: Mapping[Role, RoleForecast], refresh_s: float = REFRESH_S) -> None:
        self.roles = roles
        self._refresh_s = min(refresh_s, REFRESH_S)
        self._due_s = -np.inf
        self.backlog: Mapping[Role, Backlog] = {role: Backlog() for role in INFERENCE_ROLES}
        self.groups = GroupBacklog()

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._due_s

    def look(
        self,
        open_now: Mapping[Role, Sequence[Observation]],
        is_due: Callable[[Any], bool],
        now_s: float,
        *,
        unseen: Mapping[Role, int] | None = None,
        groups_open: int | None = None,
    ) -> None:
        """Predict anew.

        Args:
            open_now: sequences that have begun and not ended.
            is_due: whether training on a group may wait no longer than for the present step.
            unseen: further requests, by role, of which nothing is known but that they are there.
            groups_open: groups under way; given where judgements do not tell which group they are of.
        """
        unseen = unseen or {}
        opened = sum(len(sequences) for sequences in open_now.values())
        self._due_s = now_s + min(REFRESH_S, max(self._refresh_s, opened / _OPEN_PER_S))
        seen = {role: self.roles[role].look(open_now[role], unseen.get(role, 0)) for role in INFERENCE_ROLES}
        self.backlog = {role: of.backlog for role, of in seen.items()}
        rollout, genrm = (open_now[role] for role in INFERENCE_ROLES)
        judge = self.roles[Role.GENRM]
        judgements = judge.draw_new([sequence.prompt for sequence in rollout], seen[Role.ROLLOUT].chance)
        members = _Members([s.group for s in rollout], seen[Role.ROLLOUT].drawn, judgements)
        new = self._unseen_groups(unseen.get(Role.ROLLOUT, 0))
        if groups_open is None:
            left = seen[Role.GENRM].drawn
            known = _Members([s.group for s in genrm], np.full(len(left), -1.0), left)
            parts = [members.and_also(known).last(is_due), new]
        else:
            each = np.append(seen[Role.GENRM].drawn, [judge.longest_of_new(1)] * unseen.get(Role.GENRM, 0))
            last = members.last(is_due)
            waiting = _slowest_of_groups(each, groups_open - len(last[0]) - len(new[0]), groups_open)
            # What has all its responses is older than what has not: it is due first.
            parts = [last, new, (np.full(len(waiting), -1.0), waiting, np.ones(len(waiting), dtype=bool))]
        self.groups = GroupBacklog.of(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _unseen_groups(self, unseen: int) -> _Last:
        """Groups of which nothing was seen are as slow as new ones."""
        role = self.roles[Role.ROLLOUT]
        count = round(unseen / role.siblings)
        longest = role.longest_of_new(role.siblings) if count else 0.0
        judgement = self.backlog[Role.GENRM].new_mean_tokens
        return np.full(count, longest), np.full(count, judgement), np.zeros(count, dtype=bool)


_Last = tuple[Vector, Vector, Mask]
"""Of each group: what its last member has left in rollout, and in genrm; whether it is due."""


@dataclass(frozen=True, eq=False)
class _Members:
    """Open sequences by group, with what each has left in rollout (negative: it is being judged) and in genrm."""

    groups: list[Hashable]
    respond: Vector
    judge: Vector

    def and_also(self, others: _Members) -> _Members:
        return _Members(
            self.groups + others.groups,
            np.concatenate([self.respond, others.respond]),
            np.concatenate([self.judge, others.judge]),
        )

    def last(self, is_due: Callable[[Any], bool]) -> _Last:
        """The member of each group that has most before it: it ends last, more or less."""
        names = list(dict.fromkeys(self.groups))
        rows = {name: row for row, name in enumerate(names)}
        of = np.array([rows[group] for group in self.groups], dtype=int)
        order = np.lexsort((np.maximum(self.respond, 0.0) + self.judge, of))
        last = order[np.flatnonzero(np.diff(of[order], append=-1))]
        due = np.array([is_due(name) for name in names], dtype=bool)
        return self.respond[last], self.judge[last], due


def _slowest_of_groups(tokens: Vector, waiting: int, groups: int) -> Vector:
    """Tokens that the slowest judgement has left of each of ``waiting`` groups, ascending, where judgements that have
    ``tokens`` left are spread evenly over ``groups``."""
    count = min(waiting, len(tokens))
    if count <= 0:
        return np.empty(0)
    members = max(1.0, len(tokens) / groups)
    levels = ((np.arange(count) + 0.5) / count) ** (1 / members)
    return np.asarray(np.quantile(tokens, levels))
