"""How the coming minutes go under several allocations at once: sequences as a fluid, all candidates side by side.

The sequences of a role advance together, each at the rate of its slot's batch, and end in the order of the tokens they
have left; what ends in rollout arrives at genrm; what is judged makes groups, which ``core.training_flow`` follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog
from verl_pivot.core.costs import DecodeCost
from verl_pivot.core.snapshot import Role
from verl_pivot.core.training_flow import Mask, Progress, TrainingFlow, TrainModel, Vector

__all__ = ["Candidates", "Fluid", "Projection", "RoleModel"]


FOLLOW_S = 20.0
"""In which slots follow the work when nobody plans ahead."""


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

    @property
    def load_per_sequence(self) -> float:
        """What a sequence adds to a decode step, over what the step takes without any."""
        cost = self.decode
        added_s = cost.per_seq_s + cost.attn_s_per_token * self.context_tokens
        return added_s / max(1e-9, max(cost.floor_s, cost.base_s) + cost.attn_base_s)

    def rate(self, sequences: Vector, slots: Vector) -> Vector:
        """Tokens a second that each of ``sequences`` sequences gets on ``slots`` slots; 0 where there is no slot."""
        batch = sequences / np.maximum(slots, 1e-9)
        running = np.clip(batch, 1.0, self.batch_limit)
        cost = self.decode
        linear_s = np.maximum(cost.floor_s, cost.base_s + cost.per_seq_s * running)
        latency_s = linear_s + cost.attn_base_s + cost.attn_s_per_token * running * self.context_tokens
        share = np.minimum(1.0, self.batch_limit / np.maximum(batch, 1e-9))
        return np.where(slots > 1e-6, share / latency_s, 0.0)


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
    lent_rollout: Vector
    """Slots of training that serve rollout while they are lent."""
    lent_genrm: Vector
    lends: Mask
    """Training's slots serve inference while it has no batch."""
    defers: Mask
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
        patience_s: float,
        shift_s: float,
    ) -> None:
        """``patience_s``: from when on later plans move slots, each out of use for ``shift_s``."""
        self._r, self._g = roles[Role.ROLLOUT], roles[Role.GENRM]
        self._c, self._patience_s = candidates, patience_s
        self._training = TrainingFlow(train, candidates.lends, candidates.defers)
        self._train_slots, self._arrivals = train.slots, train.arrivals
        self._shift_s = shift_s
        self._own_r, self._own_g = candidates.rollout, candidates.genrm
        self._lent_r, self._lent_g = candidates.lent_rollout, candidates.lent_genrm
        n = len(candidates.rollout)
        self._responses = Cohort(self._r.backlog.remaining_tokens, np.full(n, self._r.backlog.weight))
        self._judgements = Cohort(self._g.backlog.remaining_tokens, np.full(n, self._g.backlog.weight))
        self._new: list[Cohort] = []
        """Responses to prompts that came with a version in the projection."""
        self._pool = np.zeros(n)
        """Judgements of responses that ended in the projection."""
        self._debt_r, self._debt_g = candidates.rollout_debt_s.copy(), candidates.genrm_debt_s.copy()
        self._fresh_r, self._fresh_g = np.zeros(n), np.zeros(n)
        """Slot-seconds of prefill that is owed: of what was cut off, and of what had to be prefilled anyway."""
        self._work, self._finish = np.zeros(n), np.full(n, np.inf)

    def project(self, steps_s: NDArray[np.float64]) -> Projection:
        """Through time steps of ``steps_s`` seconds."""
        now_s = 0.0
        for dt in steps_s:
            self._step(now_s, float(dt))
            now_s += float(dt)
        slots = self._c.rollout + self._c.genrm + self._train_slots
        beyond = now_s + self._left_s() / np.maximum(1.0, slots)
        owed = self._debt_r + self._debt_g  # what is cut off is paid for, if not within the horizon then after it
        work = self._work + self._training.useful_s - owed
        return Projection(work, np.where(np.isfinite(self._finish), self._finish, beyond), self._training.updates)

    def _step(self, now_s: float, dt: float) -> None:
        n_r, n_g = self._responding(), self._judgements.left() + self._pool
        slots_r, slots_g = self._slots(now_s, dt, n_r, n_g)
        busy_s, lent = self._training.busy, self._training.lent
        ended = self._roll_out(n_r, slots_r, dt)
        judged_tokens = self._grade(n_g, ended, slots_g, dt)
        progress = Progress(self._responses.progress, self._judgements.progress, judged_tokens)
        published = self._training.step(progress, dt)
        self._take_back(lent & ~self._training.lent, n_r, n_g, slots_r, slots_g)
        if published.any():
            self._publish(published, slots_r)
        self._note_end(now_s, dt, n_r + n_g, busy_s)

    def _note_end(self, now_s: float, dt: float, before: Vector, busy_s: Vector) -> None:
        """When everything was done, within the step in which it was."""
        after = self._responding() + self._judgements.left() + self._pool
        over = (after < 0.5) & self._training.idle & ~np.isfinite(self._finish)
        share = np.clip((before - 0.5) / np.maximum(before - after, 1e-9), 0.0, 1.0)
        share = np.maximum(share, np.minimum(1.0, busy_s / dt))
        self._finish = np.where(over, now_s + dt * share, self._finish)

    def _roll_out(self, n_r: Vector, slots: Vector, dt: float) -> Vector:
        """Responses gain tokens; returns how many end."""
        model = self._r
        again, self._debt_r = _pay(self._debt_r, slots, dt)
        fresh, left = _pay(self._fresh_r, slots * again, dt)
        self._work = self._work + self._fresh_r - left
        self._fresh_r = left
        v = model.rate(n_r, slots) * again * fresh
        tokens = sum((cohort.advance(v * dt) for cohort in self._new), self._responses.advance(v * dt))
        self._work = self._work + tokens / model.peak_tokens_per_s
        return np.asarray(n_r - self._responding())

    def _grade(self, n_g: Vector, ended: Vector, slots: Vector, dt: float) -> Vector:
        """Judgements gain tokens, and responses that ended join them; returns the tokens that each gains."""
        model = self._g
        # Prefill of what was cut off comes first and is no use to anybody; that of new judgements is.
        again, self._debt_g = _pay(self._debt_g, slots, dt)
        owed = self._fresh_g + ended * model.backlog.new_prompt_tokens * model.prefill_s_per_token
        fresh, self._fresh_g = _pay(owed, slots * again, dt)
        v = model.rate(n_g, slots) * again * fresh
        mean_tokens = max(1.0, model.backlog.new_mean_tokens)
        done = self._pool * -np.expm1(-v * dt / mean_tokens)
        tokens = self._judgements.advance(v * dt) + done * mean_tokens
        self._work = self._work + owed - self._fresh_g + tokens / model.peak_tokens_per_s
        self._pool = self._pool + ended - done
        return np.asarray(v * dt)

    def _publish(self, where: Mask, slots_r: Vector) -> None:
        """New prompts come, and what runs in rollout is prefilled again under the new weights, whoever publishes."""
        model = self._r
        running = np.minimum(self._responding(), slots_r * model.batch_limit)
        again_s = running * model.context_tokens * model.prefill_s_per_token
        self._fresh_r = self._fresh_r + np.where(where, again_s, 0.0)
        tokens = model.backlog.new_tokens
        if len(tokens) and self._arrivals:
            self._new.append(Cohort(tokens, np.where(where, self._arrivals / len(tokens), 0.0)))

    def _take_back(self, where: Mask, n_r: Vector, n_g: Vector, slots_r: Vector, slots_g: Vector) -> None:
        """Training took its slots: what they ran is prefilled elsewhere."""
        if not where.any():
            return
        for model, lent, n, slots, debt in (
            (self._r, self._lent_r, n_r, slots_r, self._debt_r),
            (self._g, self._lent_g, n_g, slots_g, self._debt_g),
        ):
            running = np.minimum(n * lent / np.maximum(slots, 1e-9), lent * model.batch_limit)
            debt += np.where(where, running * model.context_tokens * model.prefill_s_per_token, 0.0)

    def _responding(self) -> Vector:
        return np.asarray(sum((cohort.left() for cohort in self._new), self._responses.left()))

    def _slots(self, now_s: float, dt: float, n_r: Vector, n_g: Vector) -> tuple[Vector, Vector]:
        """Slots of either role."""
        if now_s >= self._patience_s:
            self._follow_the_work(dt, n_r, n_g)
        shifting = np.clip((self._c.shift_s - now_s) / dt, 0.0, 1.0)
        lent_r, lent_g = (self._training.lent * slots for slots in (self._lent_r, self._lent_g))
        slots_r = shifting * self._c.rollout_meanwhile + (1 - shifting) * self._own_r + lent_r
        slots_g = shifting * self._c.genrm_meanwhile + (1 - shifting) * self._own_g + lent_g
        return slots_r, slots_g

    def _follow_the_work(self, dt: float, n_r: Vector, n_g: Vector) -> None:
        """Later plans move slots to where they do most, step by step, and pay for it as plans do now. Slots do most
        where ``sequences x what each adds to a step / what a step takes anyway`` is even (the marginal rates are)."""
        own, lent = self._own_r + self._own_g, self._lent_r + self._lent_g
        weight_r, weight_g = n_r * self._r.load_per_sequence, n_g * self._g.load_per_sequence
        total = weight_r + weight_g
        share = np.where(total > 0, weight_r / np.maximum(total, 1e-9), 0.5)
        # No more slots than sequences, unless the other role has no use for them either.
        share = np.clip(share, 1 - n_g / np.maximum(own + lent, 1e-9), n_r / np.maximum(own + lent, 1e-9))
        moving = np.where(total > 0, (own * share - self._own_r) * min(1.0, dt / FOLLOW_S), 0.0)
        lent_moving = np.where(total > 0, (lent * share - self._lent_r) * min(1.0, dt / FOLLOW_S), 0.0)
        self._own_r, self._own_g = self._own_r + moving, self._own_g - moving
        self._lent_r, self._lent_g = self._lent_r + lent_moving, self._lent_g - lent_moving
        to_r = moving + np.where(self._training.lent, lent_moving, 0.0)
        for model, n, slots, leaving in (
            (self._r, n_r, self._own_r + self._lent_r, np.maximum(0.0, -to_r)),
            (self._g, n_g, self._own_g + self._lent_g, np.maximum(0.0, to_r)),
        ):
            batch = np.minimum(n / np.maximum(slots, 1e-9), model.batch_limit)
            again_s = leaving * batch * model.context_tokens * model.prefill_s_per_token
            if model is self._r:
                self._debt_r = self._debt_r + again_s
                self._debt_g = self._debt_g + leaving * self._shift_s
            else:
                self._debt_g = self._debt_g + again_s
                self._debt_r = self._debt_r + leaving * self._shift_s

    def _left_s(self) -> Vector:
        """Slot-seconds of what the horizon left over."""
        rollout, judge = self._r, self._g
        n_r = self._responses.left()
        tokens_g = self._judgements.tokens_left() + (self._pool + n_r) * judge.backlog.new_mean_tokens
        prefill_s = n_r * judge.backlog.new_prompt_tokens * judge.prefill_s_per_token
        owed_s = prefill_s + self._debt_r + self._debt_g + self._fresh_g + self._training.left_s
        tokens_r = self._responses.tokens_left()
        return np.asarray(tokens_r / rollout.peak_tokens_per_s + tokens_g / judge.peak_tokens_per_s + owed_s)


class Cohort:
    """Sequences that advance together. Each of ``tokens`` (ascending) stands for ``weight`` sequences [candidates]."""

    def __init__(self, tokens: Vector, weight: Vector) -> None:
        self._tokens, self._weight = tokens, weight
        self._suffix = np.concatenate([np.cumsum(tokens[::-1])[::-1], [0.0]])
        self.progress = np.zeros(len(weight))
        """Tokens that each has gained."""

    def left(self) -> Vector:
        """Sequences that have not ended."""
        return np.asarray(self._weight * (len(self._tokens) - self._reached()))

    def tokens_left(self) -> Vector:
        at = self._reached()
        return np.asarray(self._weight * (self._suffix[at] - (len(self._tokens) - at) * self.progress))

    def advance(self, tokens: Vector) -> Vector:
        """All gain ``tokens`` more; returns the tokens generated, less than that for those that end."""
        before = self.tokens_left()
        self.progress = self.progress + tokens
        return np.asarray(before - self.tokens_left())

    def _reached(self) -> NDArray[np.intp]:
        return np.searchsorted(self._tokens, self.progress, side="right")


def _pay(debt_s: Vector, slots: Vector, dt: float) -> tuple[Vector, Vector]:
    """Share of the time left after prefill, and the debt that remains."""
    paid = np.minimum(debt_s, slots * dt)
    return 1 - paid / np.maximum(slots * dt, 1e-9), debt_s - paid
