"""One simulated run: the same planner that a real run has, in virtual time. Deterministic by seed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import simpy

from verl_pivot.core.backlog import Backlog
from verl_pivot.core.costs import DecodeCost, ShiftCosts
from verl_pivot.core.evening import excess
from verl_pivot.core.plan import Plan, Planner
from verl_pivot.core.registry import make_planner
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import LeaseState, Role, RoleDemand, Snapshot, TrainView
from verl_pivot.observe.kinds import reason_class
from verl_pivot.sim.deployments import Layout
from verl_pivot.sim.draw import Draws
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.forecast import Forecast
from verl_pivot.sim.ledger import Mark
from verl_pivot.sim.scenario import INFERENCE_ROLES, Scenario
from verl_pivot.sim.slots import SimSlot, SimSlots
from verl_pivot.sim.training import SimTrainer

EVENING_S = 5.0


class SimulationStuck(RuntimeError):
    """Nothing can happen any more although steps are missing; the message says what everyone waits for."""


@dataclass(frozen=True)
class Failure:
    """A slot that is lost at a given time."""

    at_s: float
    slot_id: int


@dataclass(frozen=True)
class Warped:
    """How far the costs that planners see are from the true ones, as factors."""

    decode: float = 1.0
    shift: float = 1.0
    lengths: float = 1.0


class Simulation:
    """A run of ``steps`` steps of ``scenario`` under ``layout``."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        *,
        steps: int,
        settings: PlannerSettings | None = None,
        warped: Warped = Warped(),
        failures: tuple[Failure, ...] = (),
        on_plan: Callable[[Snapshot, Plan], None] | None = None,
    ) -> None:
        self.scenario, self.layout = scenario, layout
        self.env = simpy.Environment()
        self._steps = steps
        self._settings = replace(settings or PlannerSettings(), name=layout.planner)
        self._planner: Planner = make_planner(layout.planner, self._settings)
        self._warped, self._failures, self._on_plan = warped, failures, on_plan
        self.staleness = 0 if layout.whole_steps else scenario.staleness
        self._fed_steps = steps + self.staleness
        self.draws = Draws(scenario, self._fed_steps)
        self._forecasts = {role: Forecast(scenario, role, warped.lengths) for role in INFERENCE_ROLES}
        self._foresees = layout.planner == "lookahead"
        hosts = zip(layout.first_role, layout.can_host, strict=True)
        slots = [SimSlot(at, role, can) for at, (role, can) in enumerate(hosts)]
        self.slots = SimSlots(self.env, scenario, slots, self._on_ended, self._poke)
        self.trainer = SimTrainer(
            self.env,
            scenario,
            slots=layout.train_slots,
            whole_steps=layout.whole_steps,
            staleness=self.staleness,
            poke=self._poke,
            publish=self._on_publish,
        )
        self._submitted_steps = 0
        self._judged: dict[int, list[SimSequence]] = {}
        self._poked = self.env.event()
        self._evened_s = 0.0
        self.marks: list[Mark] = []
        """Counters at the beginning, and at the end of each step."""
        self.reasons: dict[str, int] = {}
        self.plans = 0

    def run(self) -> None:
        """To the end of the last step. Raises SimulationStuck when it never comes."""
        self.slots.start()
        self._mark()
        training = self.env.process(self.trainer.run(self._steps))
        self.env.process(self._plan_forever())
        for failure in self._failures:
            self.env.process(self._fail(failure))
        self._feed()
        self.env.run(until=simpy.AnyOf(self.env, [training, self.env.process(self._watch())]))
        if len(self.trainer.steps) < self._steps:
            raise SimulationStuck(self._whereabouts())

    def snapshot(self) -> Snapshot:
        """What the planner sees now."""
        for role in INFERENCE_ROLES:
            self.slots.sync(role)
        routers = self.slots.routers
        return Snapshot(
            now_s=self.env.now,
            slots=self.slots.views(),
            demand={role: RoleDemand(routers[role].queued, routers[role].inflight) for role in INFERENCE_ROLES},
            train=self._train_view(),
            decode={role: _scaled(self.slots.specs[role].decode, self._warped.decode) for role in INFERENCE_ROLES},
            shift_costs=self._shift_costs(),
            policy_version=self.trainer.version,
            last_shift_s=self.slots.last_shift_s,
            backlog={role: self._backlog(role) for role in INFERENCE_ROLES} if self._foresees else {},
            prefill_s_per_token={role: self.slots.specs[role].prefill_s_per_token for role in INFERENCE_ROLES},
            batch_limit={role: self._batch_limit(role) for role in INFERENCE_ROLES},
            staleness=self.staleness,
        )

    def _backlog(self, role: Role) -> Backlog:
        forecast, router = self._forecasts[role], self.slots.routers[role]
        if not forecast.is_due(self.env.now):
            return forecast.backlog([], self.env.now)
        inside = [sequence for engine in router.engines.values() for sequence in engine.inside()]
        return forecast.backlog([*inside, *router.waiting()], self.env.now)

    def _batch_limit(self, role: Role) -> float:
        """Sequences of present size that fit into a slot's memory."""
        engines = self.slots.routers[role].engines.values()
        running = sum(engine.running for engine in engines)
        context = sum(engine.context_tokens for engine in engines)
        spec = self.slots.specs[role]
        return min(float(spec.max_sequences), spec.kv_tokens * running / context if context else 256.0)

    def _train_view(self) -> TrainView:
        work = self.scenario.workload
        open_groups = self._submitted_steps * work.prompts_per_step - self.trainer.groups_seen
        more = self._submitted_steps < self._fed_steps
        return self.trainer.view(open_groups, work.prompts_per_step * work.responses_per_prompt if more else 0)

    def _shift_costs(self) -> ShiftCosts:
        pairs = {(a, b): self.scenario.costs.shift_s(a, b) * self._warped.shift for a in Role for b in Role if a != b}
        context = 2000 * self.slots.specs[Role.ROLLOUT].prefill_s_per_token
        return ShiftCosts(pairs, migrate_s=(0.1 + context) * self._warped.shift)

    # ---- work ---------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Prompts of all steps that may begin under the staleness limit."""
        while self._submitted_steps < min(self._fed_steps, self.trainer.version + self.staleness + 1):
            step = self._submitted_steps
            self._submitted_steps += 1
            sequences = self.draws.responses(step)
            for sequence in sequences:
                sequence.version = self.trainer.version
            if self._foresees:
                self._forecasts[Role.ROLLOUT].begin(sequences)
            self.slots.routers[Role.ROLLOUT].submit(sequences)
        self._poke()

    def _on_ended(self, role: Role, sequences: list[SimSequence]) -> None:
        if self._foresees:
            self._forecasts[role].end(sequences)
        if role is Role.ROLLOUT:
            judgements = [self.draws.judgement(sequence) for sequence in sequences]
            if self._foresees:
                self._forecasts[Role.GENRM].begin(judgements)
            self.slots.routers[Role.GENRM].submit(judgements)
        else:
            for sequence in sequences:
                self._on_judged(sequence)
        if not self.slots.routers[role].inflight:
            self._poke()

    def _on_judged(self, judgement: SimSequence) -> None:
        graded = self._judged.setdefault(judgement.group, [])
        graded.append(judgement)
        if len(graded) == self.scenario.workload.responses_per_prompt:
            del self._judged[judgement.group]
            self.trainer.add(self.draws.graded(judgement.group, judgement.step))

    def _on_publish(self, version: int) -> None:
        self._mark()
        self.slots.take_version()
        self._feed()

    # ---- plans --------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        for role in INFERENCE_ROLES:
            self.slots.sync(role)
        self.marks.append(Mark.take(self.env.now, self.slots, self.trainer))

    def _poke(self) -> None:
        if not self._poked.triggered:
            self._poked.succeed()

    def _plan_forever(self) -> Generator[Any, Any, None]:
        while True:
            self._poked = self.env.event()
            self._plan_once()
            yield self._poked | self.env.timeout(self._settings.interval_s)
            yield self.env.timeout(0.05)

    def _plan_once(self) -> None:
        if self.trainer.lease is LeaseState.WANTED and self.slots.all_train():
            self.trainer.grant()
        snapshot = self.snapshot()
        plan = self._planner.plan(snapshot)
        if self._on_plan is not None:
            self._on_plan(snapshot, plan)
        self.plans += 1
        told = reason_class(plan.reason)
        self.reasons[told] = self.reasons.get(told, 0) + 1
        for shift in plan.shifts:
            self.slots.begin(shift)
        self._even_out()

    def _even_out(self) -> None:
        if self.env.now < self._evened_s + EVENING_S:
            return
        for role, router in self.slots.routers.items():
            if router.queued:
                continue
            counts = {slot_id: engine.sequences for slot_id, engine in router.engines.items()}
            running = sum(engine.running for engine in router.engines.values())
            context = sum(engine.context_tokens for engine in router.engines.values())
            moves = excess(counts, self.slots.specs[role].decode, context / running if running else 0.0)
            for slot_id, count in moves.items():
                self._evened_s = self.env.now
                self.slots.shed(role, slot_id, count)

    # ---- faults -------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> Generator[Any, Any, None]:
        yield self.env.timeout(failure.at_s)
        self.slots.fail(failure.slot_id)
        self._poke()

    def _watch(self) -> Generator[Any, Any, None]:
        """Ends when nothing has moved for an hour of virtual time."""
        seen: tuple[Any, ...] = ()
        while True:
            yield self.env.timeout(3600)
            state = (
                len(self.trainer.steps),
                len(self.trainer.spans),
                *(self.slots.totals(role).generated_tokens for role in INFERENCE_ROLES),
            )
            if state == seen:
                return
            seen = state

    def _whereabouts(self) -> str:
        counts = ", ".join(f"{n} {role}" for role, n in self.slots.role_counts().items())
        queued = ", ".join(f"{r.queued} wait for {role}, {r.inflight} run" for role, r in self.slots.routers.items())
        view = self._train_view()
        return (
            f"step {len(self.trainer.steps) + 1} of {self._steps} never ends: slots are {counts}; {queued}; training "
            f"({view.lease}) has {view.groups_ready} of {view.groups_needed} groups"
        )


def _scaled(cost: DecodeCost, factor: float) -> DecodeCost:
    return DecodeCost(**{name: value * factor for name, value in cost.to_dict().items()})
