"""What work and shifts cost: the decode latency of one engine, and the seconds a change of role takes.

``DecodeCost`` and ``ShiftCosts`` are frozen values that travel in a snapshot. ``DecodeCostFitter`` and
``ShiftCostTracker`` live where measurements arrive (the runtime's controller, or the simulator) and hand them out.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from verl_pivot.core.snapshot import Role

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


def is_figure(value: object, most: float = 1e15) -> TypeGuard[float]:
    """A plain number from 0 to ``most``, as cost files hold them; JSON's true, NaN and endless integers are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of one decode step of one engine.

    ``latency = max(floor, base + per_seq * running) + attn_base + attn_s_per_token * context_tokens``: a step is
    bound by reading the weights (floor) or by computing (base and per sequence), and attention reads the KV cache.
    Form: the published decode fits of PivotRL. All coefficients are seconds and not negative.

    Raises ValueError when a coefficient is negative or not finite, or when a step would take no time at all.
    """

    floor_s: float = 0.0
    base_s: float = 0.0
    per_seq_s: float = 0.0
    attn_base_s: float = 0.0
    attn_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"DecodeCost.{name} is {value}: it must be a finite number of seconds, 0 or more")
        if max(self.floor_s, self.base_s, self.per_seq_s, self.attn_base_s) <= 0:
            raise ValueError("DecodeCost: a step would take no time; set floor_s, base_s, per_seq_s or attn_base_s")

    def step_latency_s(self, running: float, context_tokens: float) -> float:
        """Seconds of a step that decodes ``running`` sequences holding ``context_tokens`` tokens in all."""
        linear_s = max(self.floor_s, self.base_s + self.per_seq_s * running)
        return linear_s + self.attn_base_s + self.attn_s_per_token * context_tokens

    def tokens_per_s(self, running: float, context_tokens: float) -> float:
        """Tokens a second of one engine: each step gives every running sequence one token. 0 when none runs."""
        return running / self.step_latency_s(running, context_tokens) if running > 0 else 0.0

    @classmethod
    def from_json_entry(cls, entry: Mapping[str, Any]) -> DecodeCost:
        """From one of ``models`` in a cost file with the keys floor_ms, base_ms, per_seq_ms, attn_base_ms and
        attn_ns_per_token. Raises ValueError that names the missing keys."""
        keys = ("floor_ms", "base_ms", "per_seq_ms", "attn_base_ms", "attn_ns_per_token")
        missing = [key for key in keys if key not in entry]
        if missing:
            raise ValueError(f"decode cost of {entry.get('model', 'an unnamed model')} lacks {', '.join(missing)}")
        for key in keys:
            if not is_figure(entry[key], most=1e12):
                raise ValueError(f"{key} is {entry[key]!s:.40}: it must be a number, 0 or more")
        floor_s, base_s, per_seq_s, attn_base_s = (float(entry[key]) * 1e-3 for key in keys[:4])
        return cls(floor_s, base_s, per_seq_s, attn_base_s, float(entry["attn_ns_per_token"]) * 1e-9)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> DecodeCost:
        return cls(**{name: float(value) for name, value in values.items()})


@dataclass(frozen=True)
class _Sample:
    running: int
    context_tokens: int
    latency_s: float


class DecodeCostFitter:
    """Learns the ``DecodeCost`` of one inference role from the loads its engines report.

    Samples are kept in a grid of (running, context) cells with logarithmic edges, the newest few in each, so a long
    time at one operating point replaces only that point's samples. When there are too many cells the one not visited
    for longest goes. Memory is bounded by ``max_cells * cell_samples`` samples. Deterministic: the same calls give
    the same fit.
    """

    def __init__(
        self, *, min_samples: int = 8, max_cells: int = 128, cell_samples: int = 8, refit_s: float = 5.0
    ) -> None:
        """``min_samples``: below it, ``fit`` gives None. ``refit_s``: sample time between two real fits (tens of
        milliseconds each); in between ``fit`` gives the last one, so that it can be called at every plan."""
        self._min_samples = min_samples
        self._max_cells = max_cells
        self._cell_samples = cell_samples
        self._refit_s = refit_s
        self._cells: OrderedDict[tuple[int, int], deque[_Sample]] = OrderedDict()
        self._newest_s = -math.inf
        self._fitted_s = -math.inf
        self._fit: DecodeCost | None = None

    def add(self, running: int, context_tokens: int, tokens_per_s: float, at_s: float) -> None:
        """One report of one engine. Reports that say nothing about a step's latency (nothing ran, no rate, a time or
        rate that is not finite) are ignored."""
        usable = running > 0 and context_tokens >= 0 and math.isfinite(tokens_per_s) and math.isfinite(at_s)
        if not usable or tokens_per_s <= 0:
            return
        cell = (_log_cell(running), _log_cell(context_tokens))
        samples = self._cells.setdefault(cell, deque(maxlen=self._cell_samples))
        samples.append(_Sample(running, context_tokens, running / tokens_per_s))
        self._cells.move_to_end(cell)
        if len(self._cells) > self._max_cells:
            self._cells.popitem(last=False)
        self._newest_s = max(self._newest_s, at_s)

    def samples(self) -> Iterator[tuple[int, int, float]]:
        """(running, context_tokens, latency_s) of every sample kept."""
        for cell in self._cells.values():
            yield from ((s.running, s.context_tokens, s.latency_s) for s in cell)

    def fit(self) -> DecodeCost | None:
        """The fitted cost; None until ``min_samples`` samples are kept. Samples from a single operating point give a
        constant step latency, the neutral reading of a point: a step costs the same for a few sequences more."""
        if self._fit is not None and self._newest_s - self._fitted_s < self._refit_s:
            return self._fit
        kept = np.array(list(self.samples()), dtype=np.float64).reshape(-1, 3)
        if len(kept) < self._min_samples:
            return None
        running, context_tokens, latency_s = kept[:, 0], kept[:, 1], kept[:, 2]
        if len(self._cells) == 1:
            self._fit = DecodeCost(base_s=float(np.median(latency_s)))
        else:
            self._fit = fit_decode_cost(running, context_tokens, latency_s)
        self._fitted_s = self._newest_s
        return self._fit


def fit_decode_cost(running: Vector, context_tokens: Vector, latency_s: Vector) -> DecodeCost:
    """Robust non-negative fit; the arrays have one entry a sample.

    ``max(floor, base + per_seq * running)`` is ``base + per_seq * max(running, knee)``, so for a given knee the model
    is linear and its fit has one minimum; knees from none up to the largest batch seen are tried side by side.
    ``attn_base_s`` is 0: a constant cannot be told from floor and base together.
    """
    if not len(running):
        raise ValueError("there is no decode step to fit costs to")
    batches = np.unique(running)
    knees = np.unique(np.quantile(batches, np.linspace(0, 1, _KNEES), method="nearest"))
    knees[0] = 0.0  # the smallest batch as a knee binds nowhere: no floor
    largest, context_unit = float(batches[-1]), max(1.0, float(context_tokens.max()))
    steps = np.maximum(running, knees[:, None]) / largest
    context = np.broadcast_to(context_tokens / context_unit, steps.shape)
    fits, losses = _robust_nonnegative_fits(np.stack([np.ones_like(steps), steps, context], axis=2), latency_s)
    # The smallest knee that fits as well as any: a floor needs evidence.
    chosen = int(np.flatnonzero(losses <= losses.min() * (1 + 1e-9))[0])
    base_s, slope_s, context_s = (float(x) for x in fits[chosen])
    if base_s + slope_s <= 0:  # context explains everything; a step of short ones must still take some time
        base_s = 0.01 * float(latency_s.min())
    per_seq_s, knee = slope_s / largest, float(knees[chosen])
    return DecodeCost(base_s + per_seq_s * knee if knee else 0.0, base_s, per_seq_s, 0.0, context_s / context_unit)


def _robust_nonnegative_fits(designs: Matrix, latency_s: Vector) -> tuple[Matrix, Vector]:
    """Coefficients [designs, 3] and losses [designs] for designs [designs, samples, 3]: relative errors under the
    soft-L1 loss, so that reports taken across a prefill or a pause pull little. Iteratively reweighted least squares.
    """
    relative = designs / latency_s[:, None]
    weights = np.ones(relative.shape[:2])
    for _ in range(_ITERATIONS):
        weighted = relative * weights[:, :, None]
        coefficients = _solve_nonnegative(relative.transpose(0, 2, 1) @ weighted, weighted.sum(axis=1))
        errors = ((relative @ coefficients[:, :, None])[:, :, 0] - 1.0) / _OUTLIER
        weights = 1.0 / np.sqrt(1.0 + errors**2)
    return coefficients, np.sum(np.sqrt(1.0 + errors**2) - 1.0, axis=1)


def _solve_nonnegative(gram: Matrix, moment: Matrix) -> Matrix:
    """The x >= 0 that minimise ``x' gram x / 2 - moment' x`` for gram [n, 3, 3] and moment [n, 3]: with three columns,
    the best among the solutions on each subset of columns. A slight pull to 0 on the slopes settles what samples leave
    open (context often grows in step with running)."""
    trace = np.trace(gram, axis1=1, axis2=2)[:, None, None]
    pulled = (gram + np.diag([1e-12, 1e-6, 1e-6]) * trace)[:, None]
    kept = _SUBSETS[:, :, None] * _SUBSETS[:, None, :]
    restricted = pulled * kept + np.eye(3) * (1 - _SUBSETS)[:, None, :]
    target = moment[:, None, :] * _SUBSETS
    solutions = np.linalg.solve(restricted, target[..., None])[..., 0]
    reached = np.where((solutions >= 0).all(axis=2), (solutions * target).sum(axis=2), -np.inf)
    return np.take_along_axis(solutions, reached.argmax(axis=1)[:, None, None], axis=1)[:, 0]


_KNEES = 16
_ITERATIONS = 12
_OUTLIER = 0.05
"""Relative error from which a sample counts linearly instead of squared."""
_SUBSETS = np.array([columns for columns in product((0.0, 1.0), repeat=3) if any(columns)])


def _log_cell(value: int) -> int:
    """Cells a quarter of a doubling wide: 8 and 9 differ, 1,000 and 1,100 do not."""
    return round(4 * math.log2(value + 1))


@dataclass(frozen=True)
class ShiftCosts:
    """Seconds that changes take, as smoothed by ``ShiftCostTracker``."""

    shift_s: Mapping[tuple[Role, Role], float] = field(default_factory=dict)
    """By (source, target): drain to admission."""
    default_s: float = 5.0
    """For a pair not measured yet."""
    migrate_s: float = 5.0
    """Pause of one evicted sequence: abort, queue and re-prefill elsewhere. Published starting value for GPUs."""

    def seconds(self, source: Role, target: Role) -> float:
        """Seconds a slot serves nobody while it goes from ``source`` to ``target``."""
        return self.shift_s.get((source, target), self.default_s)


class ShiftCostTracker:
    """Smooths measured durations. Held by the controller (and the simulator); the first measurement of a kind
    replaces the assumed value, later ones move it by ``smoothing`` (published: 0.2)."""

    def __init__(self, *, default_s: float = 5.0, migrate_s: float = 5.0, smoothing: float = 0.2) -> None:
        """Raises ValueError unless ``0 < smoothing <= 1``."""
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing is {smoothing}: it must be above 0 and at most 1")
        self._smoothing = smoothing
        self._default_s = default_s
        self._assumed_migrate_s = migrate_s
        self._migrate_s: float | None = None
        self._shift_s: dict[tuple[Role, Role], float] = {}

    def add_shift(self, source: Role, target: Role, seconds: float) -> None:
        """A shift that committed. Failed shifts say nothing about the cost of one that works: leave them out."""
        self._shift_s[source, target] = self._smoothed(self._shift_s.get((source, target)), seconds)

    def add_migration(self, seconds: float) -> None:
        """One sequence's time from its abort to its next token elsewhere."""
        self._migrate_s = self._smoothed(self._migrate_s, seconds)

    def costs(self) -> ShiftCosts:
        """A frozen copy for the next snapshot."""
        migrate_s = self._assumed_migrate_s if self._migrate_s is None else self._migrate_s
        return ShiftCosts(dict(self._shift_s), self._default_s, migrate_s)

    def _smoothed(self, old: float | None, seconds: float) -> float:
        if not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"a measured duration is {seconds} s: it must be finite and not negative")
        return seconds if old is None else old + self._smoothing * (seconds - old)
