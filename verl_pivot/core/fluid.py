"""How the coming minutes go under several allocations at once: sequences as a fluid, all candidates side by side.

``core.sequence_flow`` has the sequences and groups, ``core.training_flow`` the updates; here are slots, and the rates
at which they work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_pivot.core.backlog import Mask, Vector
from verl_pivot.core.role_model import RoleModel
from verl_pivot.core.sequence_flow import SequenceFlow
from verl_pivot.core.snapshot import Role
from verl_pivot.core.training_flow import TrainingFlow, TrainModel

FOLLOW_S = 20.0
"""In which slots follow the work when nobody plans ahead."""


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
    lends_now: Mask
    """Training's slots go to inference, or are there."""
    lends_again: Mask
    """They go back to inference after each update, until the next batch is ready."""
    waits_for: Vector
    """Batches that must be ready before training takes lent slots."""


@dataclass(frozen=True, eq=False)
class Projection:
    """What came of each candidate; all arrays [candidates]."""

    work: Vector
    """Useful slot-seconds: tokens over the peak rate of their role, prefill, updates. As it stands on average in the
    late part of the horizon."""
    finish_s: Vector
    """When all groups that are known have been trained on; beyond the horizon by extrapolation."""
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
        self._c, self._patience_s, self._shift_s = candidates, patience_s, shift_s
        self._training = TrainingFlow(train, candidates.lends_now, candidates.lends_again, candidates.waits_for)
        self._all_slots = np.maximum(1.0, candidates.rollout + candidates.genrm + train.slots)
        self._own_r, self._own_g = candidates.rollout, candidates.genrm
        self._lent_r, self._lent_g = candidates.lent_rollout, candidates.lent_genrm
        n = len(candidates.rollout)
        self._flow = SequenceFlow(self._r.backlog, self._g.backlog, train.groups, train.arrivals, n)
        self._debt_r, self._debt_g = candidates.rollout_debt_s.copy(), candidates.genrm_debt_s.copy()
        self._fresh_r, self._fresh_g = (
            np.full(n, model.backlog.unread_tokens * model.prefill_s_per_token) for model in (self._r, self._g)
        )
        """Slot-seconds of prefill that is owed: of what was cut off, and of what had to be prefilled anyway."""
        self._more_come = train.arrivals > 0
        self._way_r, self._way_g = _Way(n), _Way(n)
        self._work, self._finish = np.zeros(n), np.full(n, np.inf)

    def project(self, steps_s: Vector, late: float = 0.0) -> Projection:
        """Through time steps of ``steps_s`` seconds. ``late``: their share that is the late part; 0: the last step."""
        now_s, late_s, late_work_s = 0.0, 0.0, np.zeros_like(self._work)
        late_from_s = min((1 - late) * float(steps_s.sum()), float(steps_s[:-1].sum()))
        for dt in steps_s:
            if now_s >= late_from_s - 1e-9:
                late_s += float(dt)
            self._step(now_s, float(dt))
            now_s += float(dt)
            if late_s:
                late_work_s = late_work_s + float(dt) * self._work_done_s()
        beyond = now_s + self._left_s() / self._all_slots
        finish_s = np.where(np.isfinite(self._finish), self._finish, beyond)
        return Projection(late_work_s / late_s, finish_s, self._training.updates)

    def _work_done_s(self) -> Vector:
        """Useful slot-seconds so far. What is cut off is paid for, if not yet then later."""
        return self._work + self._training.useful_s - self._debt_r - self._debt_g

    def _step(self, now_s: float, dt: float) -> None:
        n_r, n_g = self._flow.responding(), self._flow.judging()
        slots_r, slots_g = self._slots(now_s, dt, n_r, n_g)
        lent = self._training.lent
        tokens_r, tokens_g = self._gain(n_r, n_g, slots_r, slots_g, dt)
        ended = self._flow.advance(tokens_r, tokens_g)
        self._fresh_g = self._fresh_g + ended * self._g.backlog.new_prompt_tokens * self._g.prefill_s_per_token
        left_r, left_g = self._flow.responding(), self._flow.judging()
        self._work = self._work + (n_r + left_r) / 2 * tokens_r / self._r.peak_tokens_per_s
        self._work = self._work + (n_g + left_g) / 2 * tokens_g / self._g.peak_tokens_per_s
        work_left = (left_r + left_g > 1e-9) | self._flow.groups_left()
        published = self._training.step(now_s, dt, self._flow.ready(), self._flow.due_are_ready(), work_left)
        self._take_back(lent & ~self._training.lent, n_r, n_g, slots_r, slots_g)
        if published.any():
            self._publish(published, left_r, slots_r)
        self._note_end(now_s, dt, work_left, tokens_g)

    def _note_end(self, now_s: float, dt: float, work_left: Mask, tokens_g: Vector) -> None:
        """All that was known is done with the last update that it feeds, or where nothing is left to train on with
        the last judgement."""
        over = ~work_left & self._training.idle & ~np.isfinite(self._finish)
        trained = np.isfinite(self._training.finished_s) & ~np.isfinite(self._finish)
        if not (over | trained).any():
            return
        with_last = now_s + dt * self._flow.last_share(tokens_g)
        finish = np.where(trained, self._training.finished_s, with_last)
        self._finish = np.where(over | trained, finish, self._finish)

    def _gain(self, n_r: Vector, n_g: Vector, slots_r: Vector, slots_g: Vector, dt: float) -> tuple[Vector, Vector]:
        """Tokens that each sequence of either role gains. Prefill comes first: of what was cut off, which is no use to
        anybody, then of what is new."""
        tokens = []
        for model, n, slots, debt, fresh in (
            (self._r, n_r, slots_r, self._debt_r, self._fresh_r),
            (self._g, n_g, slots_g, self._debt_g, self._fresh_g),
        ):
            share, debt[:] = _pay(debt, slots, dt)
            rest, left = _pay(fresh, slots * share, dt)
            self._work = self._work + fresh - left
            fresh[:] = left
            tokens.append(model.rate(n, slots) * share * rest * dt)
        return tokens[0], tokens[1]

    def _publish(self, where: Mask, n_r: Vector, slots_r: Vector) -> None:
        """New prompts come, and what runs in rollout is prefilled again under the new weights, whoever publishes."""
        running = np.minimum(n_r, slots_r * self._r.batch_limit)
        self._fresh_r = self._fresh_r + np.where(where, self._r.prefill_s(running), 0.0)
        self._flow.let_in(where)

    def _take_back(self, where: Mask, n_r: Vector, n_g: Vector, slots_r: Vector, slots_g: Vector) -> None:
        """Training took its slots: what they ran is prefilled elsewhere."""
        if not where.any():
            return
        for model, lent, n, slots, debt in (
            (self._r, self._lent_r, n_r, slots_r, self._debt_r),
            (self._g, self._lent_g, n_g, slots_g, self._debt_g),
        ):
            running = np.minimum(n * lent / np.maximum(slots, 1e-9), lent * model.batch_limit)
            debt += np.where(where, model.again_s(running), 0.0)

    def _slots(self, now_s: float, dt: float, n_r: Vector, n_g: Vector) -> tuple[Vector, Vector]:
        """Slots of either role."""
        self._follow_the_work(dt if now_s >= self._patience_s else 0.0, n_r, n_g)
        shifting = np.clip((self._c.shift_s - now_s) / dt, 0.0, 1.0)
        lent_r, lent_g = (self._training.lent * slots for slots in (self._lent_r, self._lent_g))
        slots_r = shifting * self._c.rollout_meanwhile + (1 - shifting) * self._own_r + lent_r
        slots_g = shifting * self._c.genrm_meanwhile + (1 - shifting) * self._own_g + lent_g
        away_r, away_g = self._way_r.pass_by(dt), self._way_g.pass_by(dt)
        return np.maximum(0.0, slots_r - away_r), np.maximum(0.0, slots_g - away_g)

    def _follow_the_work(self, dt: float, n_r: Vector, n_g: Vector) -> None:
        """Later plans move slots to where they do most, step by step, and pay for it as plans do now. Slots do most
        where ``sequences x what each adds to a step / what a step takes anyway`` is even (the marginal rates are).
        Slots of rollout that nobody will use any more go at once: no cooldown keeps them."""
        own, lent = self._own_r + self._own_g, self._lent_r + self._lent_g
        weight_r, weight_g = n_r * self._r.load_per_sequence, n_g * self._g.load_per_sequence
        total = weight_r + weight_g
        share = np.where(total > 0, weight_r / np.maximum(total, 1e-9), 0.5)
        # No more slots than sequences, unless the other role has no use for them either.
        share = np.clip(share, 1 - n_g / np.maximum(own + lent, 1e-9), n_r / np.maximum(own + lent, 1e-9))
        part = np.where(~self._flow.responses_over() | self._more_come, min(1.0, dt / FOLLOW_S), 1.0) * (total > 0)
        moving, lent_moving = (own * share - self._own_r) * part, (lent * share - self._lent_r) * part
        self._own_r, self._own_g = self._own_r + moving, self._own_g - moving
        self._lent_r, self._lent_g = self._lent_r + lent_moving, self._lent_g - lent_moving
        to_r = moving + np.where(self._training.lent, lent_moving, 0.0)
        for model, n, slots, leaving, left, way in (
            (self._r, n_r, self._own_r + self._lent_r, np.maximum(0.0, -to_r), self._debt_r, self._way_g),
            (self._g, n_g, self._own_g + self._lent_g, np.maximum(0.0, to_r), self._debt_g, self._way_r),
        ):
            batch = np.minimum(n / np.maximum(slots, 1e-9), model.batch_limit)
            left += model.again_s(leaving * batch)
            way.begin(leaving, self._shift_s)

    def _left_s(self) -> Vector:
        """Slot-seconds of what the horizon left over."""
        tokens_r, tokens_g = self._flow.tokens_left()
        waiting_s = self._flow.responding() * self._g.backlog.new_prompt_tokens * self._g.prefill_s_per_token
        owed_s = waiting_s + self._debt_r + self._debt_g + self._fresh_r + self._fresh_g + self._training.left_s
        return np.asarray(tokens_r / self._r.peak_tokens_per_s + tokens_g / self._g.peak_tokens_per_s + owed_s)


class _Way:
    """Slots on their way to a role: they serve nobody. All arrays are [candidates]."""

    def __init__(self, candidates: int) -> None:
        self._slots, self._left_s = np.zeros(candidates), np.zeros(candidates)
        """Those under way, and slot-seconds until all are there."""

    def begin(self, slots: Vector, shift_s: float) -> None:
        self._slots, self._left_s = self._slots + slots, self._left_s + slots * shift_s

    def pass_by(self, dt: float) -> Vector:
        """Slots that are under way, on average over the next ``dt`` seconds; those that set out one by one arrive
        together, after the same time in the mean."""
        spent_s = np.minimum(self._left_s, self._slots * dt)
        self._left_s = self._left_s - spent_s
        self._slots = np.where(self._left_s > 1e-9, self._slots, 0.0)
        return np.asarray(spent_s / dt)


def _pay(debt_s: Vector, slots: Vector, dt: float) -> tuple[Vector, Vector]:
    """Share of the time left after prefill, and the debt that remains."""
    paid = np.minimum(debt_s, slots * dt)
    return 1 - paid / np.maximum(slots * dt, 1e-9), debt_s - paid
