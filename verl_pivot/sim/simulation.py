"""One simulated run: the same planner that a real run has, in virtual time. Deterministic by seed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import simpy

from verl_pivot.core.bound import bound_s
from verl_pivot.core.evening import excess
from verl_pivot.core.forecast import REFRESH_S
from verl_pivot.core.plan import Plan, Planner
from verl_pivot.core.registry import make_planner
from verl_pivot.core.settings import PlannerSettings
from verl_pivot.core.snapshot import INFERENCE_ROLES, LeaseState, Role, Snapshot
from verl_pivot.observe.kinds import reason_class
from verl_pivot.sim.deployments import Layout
from verl_pivot.sim.draw import Draws
from verl_pivot.sim.engine import SimSequence
from verl_pivot.sim.forecast import Forecast
from verl_pivot.sim.ledger import Mark
from verl_pivot.sim.router import running_like
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.slots import SimSlot, SimSlots
from verl_pivot.sim.training import SimTrainer
from verl_pivot.sim.view import StepsOpen, View, Warped

EVENING_S = 5.0
LONGEST_LOOK_S = 15.0
"""Between two plans of a planner that looks ahead."""


class SimulationStuck(RuntimeError):
    """Nothing can happen any more although steps are missing; the message says what everyone waits for."""


@dataclass(frozen=True)
class Failure:
    """A slot that is lost at a given time."""

    at_s: float
    slot_id: int


class Simulation:
    """A run of ``steps`` steps of ``scenario`` under ``layout``.

    Args:
        draws: lengths of ``steps`` + staleness steps; default: seeded ones.
        warped: what planners get wrong.
        failures: slots that are lost.
        on_plan: told every snapshot and plan.
    """

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        *,
        steps: int,
        settings: PlannerSettings | None = None,
        draws: Draws | None = None,
        warped: Warped | None = None,
        failures: tuple[Failure, ...] = (),
        on_plan: Callable[[Snapshot, Plan], None] | None = None,
    ) -> None:
        self.scenario, self.layout = scenario, layout
        self.env = simpy.Environment()
        self._steps = steps
        self._settings = replace(settings or PlannerSettings(), name=layout.planner)
        self._planner: Planner = make_planner(layout.planner, self._settings)
        warped = warped if warped is not None else Warped()
        self._failures, self._on_plan = failures, on_plan
        self.staleness = 0 if layout.whole_steps else scenario.staleness
        self._fed_steps = steps + self.staleness
        self.draws = draws if draws is not None else Draws.seeded(scenario, steps + scenario.staleness)
        self._forecast = Forecast(scenario, warped.lengths) if layout.planner == "lookahead" else None
        self._interval_s = self._settings.interval_s if self._forecast is None else self._look_interval_s()
        hosts = zip(layout.first_role, layout.can_host, strict=True)
        slots = [SimSlot(at, role, can) for at, (role, can) in enumerate(hosts)]
        self.slots = SimSlots(self.env, scenario, slots, self._on_ended, self._poke)
        self.trainer = SimTrainer(
            self.env,
            scenario,
            slots=self.slots.train_slots,
            whole_steps=layout.whole_steps,
            staleness=self.staleness,
            poke=self._poke,
            publish=self._on_publish,
        )
        self._view = View(self.env, scenario, self.slots, self.trainer, self._forecast, warped, self.staleness)
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

    def _look_interval_s(self) -> float:
        """Between plans of a planner that looks ahead, unless something happens: not before there is a new prediction,
        and some sixty times a step, which is often enough for it and keeps simulations of large models short."""
        peaks = self.scenario.peaks(self.draws.context_tokens(0))
        step_s = bound_s(self.draws.work(0, peaks, self.scenario.staleness), peaks, self.scenario.slots)
        return max(self._settings.interval_s, REFRESH_S, min(LONGEST_LOOK_S, step_s / 60))

    def _steps_open(self) -> StepsOpen:
        return StepsOpen(self._submitted_steps, self._submitted_steps < self._fed_steps)

    # ---- work ---------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Prompts of all steps that may begin under the staleness limit."""
        while self._submitted_steps < min(self._fed_steps, self.trainer.version + self.staleness + 1):
            step = self._submitted_steps
            self._submitted_steps += 1
            sequences = self.draws.responses(step)
            if self._forecast is not None:
                self._forecast.roles[Role.ROLLOUT].begin(sequences)
            self.slots.routers[Role.ROLLOUT].submit(sequences)
        self._poke()

    def _on_ended(self, role: Role, sequences: list[SimSequence]) -> None:
        if self._forecast is not None:
            self._forecast.roles[role].end(sequences)
        if role is Role.ROLLOUT:
            judgements = [self.draws.judgement(sequence) for sequence in sequences]
            if self._forecast is not None:
                self._forecast.roles[Role.GENRM].begin(judgements)
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
        if self.scenario.costs.feed_s:
            self.env.timeout(self.scenario.costs.feed_s).callbacks.append(lambda _: self._feed())
        else:
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
            yield self._poked | self.env.timeout(self._interval_s)
            yield self.env.timeout(0.05)

    def _plan_once(self) -> None:
        if self.trainer.lease is LeaseState.WANTED and self.slots.all_train():
            self.trainer.grant()
        snapshot = self._view.snapshot(self._steps_open())
        plan = self._planner.plan(snapshot)
        if self._on_plan is not None:
            self._on_plan(snapshot, plan)
        self.plans += 1
        told = reason_class(plan.reason)
        self.reasons[told] = self.reasons.get(told, 0) + 1
        self.slots.begin(plan.shifts)
        self._even_out()

    def _even_out(self) -> None:
        if self.env.now < self._evened_s + EVENING_S:
            return
        for role, router in self.slots.routers.items():
            if router.queued:
                continue
            counts = {slot_id: engine.sequences for slot_id, engine in router.engines.items()}
            spec = self.slots.specs[role]
            moves = excess(counts, spec.decode, running_like(router.engines.values(), spec.prefill_s_per_token))
            for slot_id, count in moves.items():
                self._evened_s = self.env.now
                self.slots.shed(role, slot_id, count)

    # ---- faults -------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> Generator[Any, Any, None]:
        yield self.env.timeout(failure.at_s)
        self.slots.fail(failure.slot_id)
        self._poke()

    def _watch(self) -> Generator[Any, Any, None]:
        """Ends when nothing has moved for an hour of virtual time, or twice what takes longest."""
        seen: tuple[Any, ...] = ()
        while True:
            yield self.env.timeout(max(3600.0, 2 * self.scenario.costs.longest_s))
            state = (
                len(self.trainer.spans),
                len(self.slots.shifts),
                *(self.slots.totals(role).generated_tokens for role in INFERENCE_ROLES),
            )
            if state == seen and self.env.now >= self.trainer.busy_until_s:
                return
            seen = state

    def _whereabouts(self) -> str:
        counts = ", ".join(f"{n} {role}" for role, n in self.slots.role_counts().items())
        queued = ", ".join(f"{r.queued} wait for {role}, {r.inflight} run" for role, r in self.slots.routers.items())
        view = self._view.train(self._steps_open())
        return (
            f"step {len(self.trainer.steps) + 1} of {self._steps} never ends: slots are {counts}; {queued}; training "
            f"({view.lease}) has {view.groups_ready} of {view.groups_needed} groups"
        )
