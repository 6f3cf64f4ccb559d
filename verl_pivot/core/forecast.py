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
_NEW = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
_SMOOTHING = 0.001
"""How far one prompt moves the mean prompt."""


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
        prompt_tokens: of a request, before any was seen.
        factor: makes it wrong on purpose: lengths come out that many times too long.
    """

    def __init__(
        self, predictor: LengthPredictor, siblings: int, prompt_tokens: float = 0.0, factor: float = 1.0
    ) -> None:
        self._predictor = predictor
        self._siblings = siblings
        self._prompt_tokens = prompt_tokens
        self._factor = factor

    def begin(self, sequences: Iterable[Observation]) -> None:
        for sequence in sequences:
            self._predictor.start(sequence.key, sequence.group, sequence.prompt, self._siblings)
            self._prompt_tokens += _SMOOTHING * (sequence.prompt_tokens - self._prompt_tokens)

    def end(self, key: Hashable, tokens: int) -> None:
        """A sequence ended with ``tokens`` tokens in all."""
        self._predictor.finish(key, tokens)

    def look(self, sequences: Sequence[Observation]) -> tuple[Backlog, dict[Hashable, float]]:
        """Of all sequences that have begun and not ended: the backlog, and the tokens that the slowest of each group
        has left, in the median."""
        self._predictor.progress({sequence.key: sequence.generated_tokens for sequence in sequences})
        quantiles, spread = self._predictor.outlook([sequence.key for sequence in sequences])
        new = self._predictor.total_of_new([None], _NEW)[0] * self._factor
        members = Counter(sequence.group for sequence in sequences)
        # The median of the largest of k equals is a higher quantile of each.
        levels = 0.5 ** (1 / np.array([members[sequence.group] for sequence in sequences]))
        slowest: dict[Hashable, float] = {}
        for sequence, tokens in zip(sequences, _at_levels(quantiles, levels).tolist(), strict=True):
            slowest[sequence.group] = max(tokens * self._factor, slowest.get(sequence.group, 0.0))
        return Backlog.of(spread * self._factor, new, self._prompt_tokens), slowest

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
    """Both roles, and the groups that their sequences make. Looks again after ``REFRESH_S``."""

    def __init__(self, roles: Mapping[Role, RoleForecast]) -> None:
        self.roles = roles
        self._made_s = -np.inf
        self.backlog: Mapping[Role, Backlog] = {role: Backlog() for role in INFERENCE_ROLES}
        self.groups = GroupBacklog()

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._made_s + REFRESH_S

    def look(self, open_now: Mapping[Role, Sequence[Observation]], is_due: Callable[[Any], bool], now_s: float) -> None:
        """``open_now``: sequences that have begun and not ended. ``is_due``: whether training on a group may wait no
        longer than for the present step."""
        self._made_s = now_s
        seen = {role: self.roles[role].look(open_now[role]) for role in INFERENCE_ROLES}
        self.backlog = {role: backlog for role, (backlog, _) in seen.items()}
        rollout, genrm = seen[Role.ROLLOUT][1], seen[Role.GENRM][1]
        judged_alone = {group: tokens for group, tokens in genrm.items() if group not in rollout}
        self.groups = GroupBacklog(
            np.sort(np.array(list(rollout.values()))),
            np.sort(np.array(list(judged_alone.values()))),
            LAST_JUDGEMENT * self.backlog[Role.GENRM].new_mean_tokens,
            max((tokens for group, tokens in rollout.items() if is_due(group)), default=0.0),
            max((tokens for group, tokens in judged_alone.items() if is_due(group)), default=0.0),
        )
