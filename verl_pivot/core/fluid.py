"""How the coming minutes go under several allocations at once: sequences as a fluid, all candidates side by side.

The sequences of a role advance together, each at the rate of its slot's batch, and end in the order of the tokens they
have left; what ends in rollout arrives at genrm; what is judged makes groups; groups make batches that training takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog
from verl_pivot.core.costs import DecodeCost
from verl_pivot.core.snapshot import Role

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class RoleModel:
    """One inference role on one slot."""

    decode: DecodeCost
    context_tokens: float
    """Mean tokens that a running sequence holds."""
    batch_limit: float
    """Sequences that a slot runs at a time."""
    prefill_s_per_token: float
    backlog: Backlog

    @property
    def peak_tokens_per_s(self) -> float:
        """The most that a slot generates."""
        return self.decode.tokens_per_s(self.batch_limit, self.batch_limit * self.context_tokens)

    def rate(self, sequences: Vector, slots: Vector) -> Vector:
        """Tokens a second that each of ``sequences`` sequences gets on ``slots`` slots; 0 where there is no slot."""
        batch = sequences / np.maximum(slots, 1e-9)
        running = np.clip(batch, 1.0, self.batch_limit)
        cost = self.decode
        linear_s = np.maximum(cost.floor_s, cost.base_s + cost.per_seq_s * running)
        latency_s = linear_s + cost.attn_base_s + cost.attn_s_per_token * running * self.context_tokens
        share = np.minimum(1.0, self.batch_limit / np.maximum(batch, 1e-9))
        return np.where(slots > 1e-6, share / latency_s, 0.0)


@dataclass(frozen=True)
class TrainModel:
    """Training as the projection sees it."""

    slots: int
    is_lent: bool
    """Its slots serve inference at present."""
    busy_s: float
    """Seconds that the present update, and what belongs to it, will go on."""
    update_s: float
    """Of one batch."""
    groups_ready: float
    groups_needed: float
    groups_open: float
    """Groups under way, before training."""
    batches_to_publish: int
    """Until the version changes and new prompts come."""
    arrivals: float
    """Sequences that come with a new version; 0 when none do."""
    to_train_s: float
    from_train_s: float


@dataclass(frozen=True, eq=False)
class Candidates:
    """Allocations to look at, one row each; all arrays [candidates]."""

    rollout: Vector
    """Slots of rollout once shifts are done, those lent by training left out."""
    genrm: Vector
    rollout_meanwhile: Vector
    """Slots while shifts last."""
    genrm_meanwhile: Vector
    shift_s: Vector
    rollout_debt_s: Vector
    """Slot-seconds of prefill for sequences that are cut off."""
    genrm_debt_s: Vector
    lends: NDArray[np.bool_]
    """Training's slots serve inference while it has no batch."""
    lent_rollout_share: Vector
    """Of lent slots, those that serve rollout."""
    defers: NDArray[np.bool_]
    """Training takes lent slots only when all batches up to the next publish are ready."""


@dataclass(frozen=True, eq=False)
class Projection:
    """What came of each candidate; all arrays [candidates]."""

    work: Vector
    """Useful slot-seconds within the horizon: tokens over the peak rate of their role, prefill, updates."""
    finish_s: Vector
    """When all work that is known ends; beyond the horizon by extrapolation."""
    updates: Vector
    """Batches trained within the horizon."""


class Fluid:
    """The state of all candidates as time goes on. ``project`` is the whole use of it."""

    def __init__(
        self,
        roles: Mapping[Role, RoleModel],
        train: TrainModel,
        candidates: Candidates,
        readiness: float,
        patience_s: float,
    ) -> None:
        """``patience_s``: how long until slots that a role has more of than sequences are put to use by later plans.
        ``readiness``: groups are ready as this power of the judged share; 1 in a steady stream, more where all
        groups began together."""
        self._r, self._g = roles[Role.ROLLOUT], roles[Role.GENRM]
        self._train, self._c, self._readiness = train, candidates, readiness
        self._patience_s = patience_s
        n = len(candidates.rollout)
        self._x, self._x_new, self._y = np.zeros(n), np.zeros(n), np.zeros(n)
        self._arrived = np.zeros(n)
        self._pool = np.zeros(n)
        """Judgements of responses that ended in the projection."""
        self._debt_r, self._debt_g = candidates.rollout_debt_s.copy(), candidates.genrm_debt_s.copy()
        self._fresh_g = np.zeros(n)
        self._judged, self._total = np.zeros(n), self._r.backlog.sequences + self._g.backlog.sequences
        self._ready = np.full(n, train.groups_ready)
        self._busy = np.full(n, train.busy_s)
        self._lent = np.full(n, train.is_lent and train.busy_s <= 0)
        self._lending_s = np.where(candidates.lends & ~self._lent, train.from_train_s, 0.0)
        self._batches = np.full(n, float(train.batches_to_publish))
        self._updates, self._work = np.zeros(n), np.zeros(n)
        self._finish = np.full(n, np.inf)

    def project(self, steps_s: Vector) -> Projection:
        """Through time steps of ``steps_s`` seconds."""
        now_s = 0.0
        for dt in steps_s:
            self._step(now_s, float(dt))
            now_s += float(dt)
        left = self._left_s()
        slots = self._c.rollout + self._c.genrm + self._train.slots
        beyond = now_s + left / np.maximum(1.0, slots)
        owed = (
            self._debt_r + self._debt_g
        )  # whoever cuts sequences off pays for it, if not within the horizon then after
        return Projection(self._work - owed, np.where(np.isfinite(self._finish), self._finish, beyond), self._updates)

    def _step(self, now_s: float, dt: float) -> None:
        rollout, judge = self._r, self._g
        old, new = _left(rollout.backlog.remaining_tokens, self._x) * rollout.backlog.weight, self._new_left()
        judging = _left(judge.backlog.remaining_tokens, self._y) * judge.backlog.weight
        n_r, n_g = old + new, judging + self._pool
        slots_r, slots_g = self._slots(now_s, n_r, n_g)
        time_r, self._debt_r = _pay(self._debt_r, slots_r, dt)
        v = rollout.rate(n_r, slots_r) * time_r
        self._x, self._x_new = self._x + v * dt, np.where(self._arrived > 0, self._x_new + v * dt, 0.0)
        left = _left(rollout.backlog.remaining_tokens, self._x) * rollout.backlog.weight
        ended = old - left + new - self._new_left()
        self._work += np.minimum(n_r, (left + self._new_left() + n_r) / 2) * v * dt / rollout.peak_tokens_per_s

        # Prefill of what was cut off comes first and is no use to anybody; that of new judgements is.
        again_g, self._debt_g = _pay(self._debt_g, slots_g, dt)
        owed = self._fresh_g + ended * judge.backlog.new_prompt_tokens * judge.prefill_s_per_token
        fresh_g, self._fresh_g = _pay(owed, slots_g * again_g, dt)
        self._work += owed - self._fresh_g
        time_g = again_g * fresh_g
        v = judge.rate(n_g, slots_g) * time_g
        self._y = self._y + v * dt
        left_g = _left(judge.backlog.remaining_tokens, self._y) * judge.backlog.weight
        done = self._pool * -np.expm1(-v * dt / max(1.0, judge.backlog.new_mean_tokens))
        self._work += (
            (np.minimum(judging, (judging + left_g) / 2) + self._pool - done / 2) * v * dt / (judge.peak_tokens_per_s)
        )
        self._pool = self._pool + ended - done
        self._judge(judging - left_g + done)
        self._update(dt)
        over = (n_r + n_g < 0.5) & (self._ready < self._train.groups_needed) & (self._busy <= 0)
        self._finish = np.where(over & ~np.isfinite(self._finish), now_s + dt, self._finish)

    def _new_left(self) -> Vector:
        quantiles = self._r.backlog.new_tokens
        share = _left(quantiles, self._x_new) / max(1, len(quantiles))
        return self._arrived * share

    def _slots(self, now_s: float, n_r: Vector, n_g: Vector) -> tuple[Vector, Vector]:
        """Slots of either role; those that a role has more of than sequences serve the other."""
        meanwhile = now_s < self._c.shift_s
        slots_r = np.where(meanwhile, self._c.rollout_meanwhile, self._c.rollout)
        slots_g = np.where(meanwhile, self._c.genrm_meanwhile, self._c.genrm)
        lent = np.where(self._lent, self._train.slots, 0.0)
        share = self._c.lent_rollout_share
        slots_r, slots_g = slots_r + lent * share, slots_g + lent * (1 - share)
        if now_s < self._patience_s:
            return slots_r, slots_g
        spare_r, spare_g = np.maximum(0.0, slots_r - n_r), np.maximum(0.0, slots_g - n_g)
        return slots_r - spare_r + spare_g, slots_g - spare_g + spare_r

    def _judge(self, judged: Vector) -> None:
        before = np.minimum(1.0, self._judged / max(1.0, self._total)) ** self._readiness
        self._judged = self._judged + judged
        after = np.minimum(1.0, self._judged / max(1.0, self._total)) ** self._readiness
        self._ready = self._ready + (after - before) * self._train.groups_open

    def _update(self, dt: float) -> None:
        train = self._train
        was_busy = self._busy > 0
        self._work += np.minimum(self._busy, dt) * train.slots
        self._busy = np.maximum(0.0, self._busy - dt)
        ended = was_busy & (self._busy <= 0)
        self._updates += ended
        self._batches = self._batches - ended
        published = ended & (self._batches <= 0)
        self._arrived = np.where(published & (self._arrived <= 0), train.arrivals, self._arrived)
        self._batches = np.where(published, float(max(1, train.batches_to_publish)), self._batches)
        self._lending_s = np.where(ended & self._c.lends, train.from_train_s, self._lending_s)
        batches = np.where(self._c.defers & self._lent, np.maximum(1.0, self._batches), 1.0)
        begins = (self._busy <= 0) & (self._ready >= batches * train.groups_needed - 1e-6)
        self._ready = np.where(begins, self._ready - train.groups_needed, self._ready)
        start_s = np.where(self._lent, train.to_train_s, 0.0)
        self._busy = np.where(begins, train.update_s + start_s, self._busy)
        self._work -= np.where(begins, start_s, 0.0) * train.slots  # waking up is no use to anybody
        self._lent = self._lent & ~begins
        free = self._c.lends & (self._busy <= 0) & ~self._lent
        self._lending_s = np.where(free, self._lending_s - dt, self._lending_s)
        self._lent = self._lent | (free & (self._lending_s <= 0))

    def _left_s(self) -> Vector:
        """Slot-seconds of what the horizon left over."""
        rollout, judge = self._r, self._g
        tokens_r = _tokens_left(rollout.backlog.remaining_tokens, self._x) * rollout.backlog.weight
        n_r = _left(rollout.backlog.remaining_tokens, self._x) * rollout.backlog.weight
        tokens_g = _tokens_left(judge.backlog.remaining_tokens, self._y) * judge.backlog.weight
        new_mean = judge.backlog.new_mean_tokens
        tokens_g = tokens_g + (self._pool + n_r) * new_mean
        groups = self._train.groups_open * np.maximum(0.0, 1 - self._judged / max(1.0, self._total)) + self._ready
        batches = groups / max(1.0, self._train.groups_needed)
        train_s = (batches * self._train.update_s + self._busy) * self._train.slots
        prefill_s = n_r * judge.backlog.new_prompt_tokens * judge.prefill_s_per_token
        prefill_s = prefill_s + self._debt_r + self._debt_g + self._fresh_g
        return np.asarray(
            tokens_r / rollout.peak_tokens_per_s + tokens_g / judge.peak_tokens_per_s + prefill_s + train_s
        )


def _left(ascending: Vector, progress: Vector) -> Vector:
    """How many of the values are beyond ``progress``."""
    return (len(ascending) - np.searchsorted(ascending, progress, side="right")).astype(np.float64)


def _tokens_left(ascending: Vector, progress: Vector) -> Vector:
    suffix = np.concatenate([np.cumsum(ascending[::-1])[::-1], [0.0]])
    at = np.searchsorted(ascending, progress, side="right")
    return np.asarray(suffix[at] - (len(ascending) - at) * progress)


def _pay(debt_s: Vector, slots: Vector, dt: float) -> tuple[Vector, Vector]:
    """Share of the time left after prefill, and the debt that remains."""
    paid = np.minimum(debt_s, slots * dt)
    return 1 - paid / np.maximum(slots * dt, 1e-9), debt_s - paid
