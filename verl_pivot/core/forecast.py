"""What is left to generate and to judge, predicted from sequences as they are observed: backlogs for a snapshot.

Fed with what begins and ends, and asked with all that is open at a moment. The controller of a run and the simulator
make what planners see of lengths with this, and neither ever tells it how long a sequence will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog, GroupBacklog
from verl_pivot.core.lengths import LEVELS, LengthPredictor
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role

Vector = NDArray[np.float64]

REFRESH_S = 4.0
"""Between two predictions; what was predicted is good for longer than a plan."""
LAST_JUDGEMENT = 1.25
"""The judgement that a group waits for last, over the mean one: it is not just any."""
_OPEN_PER_S = 4000.0
"""Open sequences for which looking once a second takes about a hundredth of it."""
_NEW = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
_PROMPTS = 1000
"""Of which the mean is kept."""


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

    def look(self, sequences: Sequence[Observation], unseen: int = 0) -> tuple[Backlog, dict[Hashable, float]]:
        """The backlog, and the tokens that the slowest sequence of each group has left, in the median.

        Args:
            sequences: all that have begun and not ended.
            unseen: further requests, of which nothing else is known; they are in no group.
        """
        self._predictor.progress({sequence.key: sequence.generated_tokens for sequence in sequences})
        quantiles, spread = self._predictor.outlook([sequence.key for sequence in sequences])
        new = self._predictor.total_of_new([None], _NEW)[0] * self._factor
        members = Counter(sequence.group for sequence in sequences)
        # The median of the largest of k equals is a higher quantile of each.
        levels = 0.5 ** (1 / np.array([members[sequence.group] for sequence in sequences]))
        slowest: dict[Hashable, float] = {}
        for sequence, tokens in zip(sequences, _at_levels(quantiles, levels).tolist(), strict=True):
            slowest[sequence.group] = max(tokens * self._factor, slowest.get(sequence.group, 0.0))
        # Each gets half of the quantiles of a new one, in turns.
        waiting = np.resize(new.reshape(-1, 2).T, (unseen, len(new) // 2))
        return Backlog.of(np.concatenate([spread * self._factor, waiting]), new, self.prompt_tokens), slowest

    def longest_of_new(self, count: float) -> float:
        """Tokens of the longest of ``count`` requests that have not begun, in the median."""
        level = 0.5 ** (1 / max(1.0, count))
        return float(self._predictor.total_of_new([None], (level,))[0, 0]) * self._factor

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with. JSON with text keys."""
        return self._predictor.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._predictor.load(state)


def _at_levels(quantiles: Vector, levels: Vector) -> Vector:
    """Each row of ``quantiles`` [n, len(LEVELS)] at its own level [n], not beyond the highest that is known."""
    grid = np.array(LEVELS)
    above = np.clip(np.searchsorted(grid, levels), 1, len(grid) - 1)
    share = np.clip((levels - grid[above - 1]) / (grid[above] - grid[above - 1]), 0.0, 1.0)
    rows = np.arange(len(levels))
    return np.asarray((1 - share) * quantiles[rows, above - 1] + share * quantiles[rows, above])


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
        self.backlog = {role: backlog for role, (backlog, _) in seen.items()}
        rollout, genrm = seen[Role.ROLLOUT][1], seen[Role.GENRM][1]
        responses = self._with_unseen(rollout, unseen.get(Role.ROLLOUT, 0))
        if groups_open is None:
            alone = {group: tokens for group, tokens in genrm.items() if group not in rollout}
            judgements = np.sort(np.array(list(alone.values())))
            due_judgements = max((tokens for group, tokens in alone.items() if is_due(group)), default=0.0)
        else:
            each = [*genrm.values(), *[self.roles[Role.GENRM].longest_of_new(1)] * unseen.get(Role.GENRM, 0)]
            judgements = _slowest_of_groups(np.array(each), groups_open - len(responses), groups_open)
            # What has all its responses is older than what has not: it is due first.
            due_judgements = float(judgements[-1]) if len(judgements) else 0.0
        self.groups = GroupBacklog(
            responses,
            judgements,
            LAST_JUDGEMENT * self.backlog[Role.GENRM].new_mean_tokens,
            max((tokens for group, tokens in rollout.items() if is_due(group)), default=0.0),
            due_judgements,
        )

    def _with_unseen(self, slowest: Mapping[Hashable, float], unseen: int) -> Vector:
        """Groups of which nothing was seen are as slow as new ones."""
        role = self.roles[Role.ROLLOUT]
        count = round(unseen / role.siblings)
        new = [role.longest_of_new(role.siblings)] * count if count else []
        return np.sort(np.array([*slowest.values(), *new]))


def _slowest_of_groups(tokens: Vector, waiting: int, groups: int) -> Vector:
    """Tokens that the slowest judgement has left of each of ``waiting`` groups, ascending, where judgements that have
    ``tokens`` left are spread evenly over ``groups``."""
    count = min(waiting, len(tokens))
    if count <= 0:
        return np.empty(0)
    members = max(1.0, len(tokens) / groups)
    levels = ((np.arange(count) + 0.5) / count) ** (1 / members)
    return np.asarray(np.quantile(tokens, levels))
