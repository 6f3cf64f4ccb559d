"""What planners see of a simulated run: the same snapshots that the controller of a real one makes."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from verl_pivot.core.costs import DecodeCost, ShiftCosts
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role, RoleDemand, Snapshot, TrainView
from verl_pivot.sim.forecast import Forecast
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.slots import SimSlots
from verl_pivot.sim.training import SimTrainer

MIGRATION_S = 0.1
"""Abort, way to another engine and its queue, before prefill."""
MIGRATED_TOKENS = 2000
"""Context that is prefilled for a sequence that moves, as the assumed cost of a migration has it."""


@dataclass(frozen=True)
class Warped:
    """How far the costs that planners see are from the true ones, as factors."""

    decode: float = 1.0
    shift: float = 1.0
    lengths: float = 1.0


@dataclass(frozen=True)
class StepsOpen:
    """How far prompts have been submitted."""

    submitted: int
    """Steps whose prompts are out."""
    more: bool
    """Further ones are to come."""


class View:
    """Makes snapshots. Without ``forecast`` they say nothing of lengths to come."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        slots: SimSlots,
        trainer: SimTrainer,
        forecast: Forecast | None,
        warped: Warped,
        staleness: int,
    ) -> None:
        self._env, self._scenario, self._slots, self._trainer = env, scenario, slots, trainer
        self._forecast, self._warped, self._staleness = forecast, warped, staleness

    def snapshot(self, steps: StepsOpen) -> Snapshot:
        """All that a planner may look at, as of now."""
        for role in INFERENCE_ROLES:
            self._slots.sync(role)
        routers, specs, forecast = self._slots.routers, self._slots.specs, self._forecast
        requests = {role: router.queued + router.inflight for role, router in routers.items()}
        if forecast is not None and forecast.is_due(self._env.now, requests):
            open_now = {
                role: [s for engine in router.engines.values() for s in engine.inside()] + list(router.waiting())
                for role, router in routers.items()
            }
            forecast.look(open_now, self._trainer.due_step, self._env.now)
        return Snapshot(
            now_s=self._env.now,
            slots=self._slots.views(),
            demand={role: RoleDemand(routers[role].queued, routers[role].inflight) for role in INFERENCE_ROLES},
            train=self.train(steps),
            decode={role: _scaled(specs[role].decode, self._warped.decode) for role in INFERENCE_ROLES},
            shift_costs=self._shift_costs(),
            policy_version=self._trainer.version,
            last_shift_s=self._slots.last_shift_s,
            backlog=forecast.backlog if forecast is not None else {},
            groups=forecast.groups if forecast is not None else None,
            prefill_s_per_token={role: specs[role].prefill_s_per_token for role in INFERENCE_ROLES},
            batch_limit={role: self._batch_limit(role) for role in INFERENCE_ROLES},
            staleness=self._staleness,
        )

    def train(self, steps: StepsOpen) -> TrainView:
        work = self._scenario.workload
        open_groups = steps.submitted * work.prompts_per_step - self._trainer.groups_seen
        return self._trainer.view(open_groups, work.prompts_per_step * work.responses_per_prompt if steps.more else 0)

    def _batch_limit(self, role: Role) -> float:
        """Sequences of present size that fit into a slot's memory."""
        engines = self._slots.routers[role].engines.values()
        running = sum(engine.running for engine in engines)
        context = sum(engine.context_tokens for engine in engines)
        spec = self._slots.specs[role]
        return min(float(spec.max_sequences), spec.kv_tokens * running / context) if context else spec.max_sequences

    def _shift_costs(self) -> ShiftCosts:
        costs, factor = self._scenario.costs, self._warped.shift
        pairs = {(a, b): costs.shift_s(a, b) * factor for a in Role for b in Role if a is not b}
        prefill_s = MIGRATED_TOKENS * self._slots.specs[Role.ROLLOUT].prefill_s_per_token
        return ShiftCosts(pairs, migrate_s=(MIGRATION_S + prefill_s) * factor)


def _scaled(cost: DecodeCost, factor: float) -> DecodeCost:
    return DecodeCost(**{name: value * factor for name, value in cost.to_dict().items()})
