"""The controller: looks, lets the planner decide, and has the plan carried out.

Owns the slots' state, the trainer's lease and the background tasks of a run; holds no engine and no weights itself.
Lives in the control-plane process, in the event loop that also runs balancer and judge router, so that a change of
state and what follows from it happen between two awaits. Never waits for an engine without a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.core.evening import Sequences, excess
from verl_pivot.core.plan import Planner
from verl_pivot.core.snapshot import Role, SlotStatus, Snapshot
from verl_pivot.observe.kinds import reason_class
from verl_pivot.runtime.executor import Executor
from verl_pivot.runtime.lease import Lease
from verl_pivot.runtime.lengths import BEGINS_AGAIN, LengthWatch
from verl_pivot.runtime.ports import AdmissionPort, Clock, EnginePort, EventSink
from verl_pivot.runtime.slots import Slot, SlotTable
from verl_pivot.runtime.snapshots import LoadMonitor, LostEngine, demand_of
from verl_pivot.runtime.steps import ShiftPorts
from verl_pivot.runtime.tasks import TaskSet
from verl_pivot.runtime.training import TrainerState, TrainingWatch

logger = logging.getLogger(__name__)

PLAN_SPACING_S = 0.02
"""Least time between two plans: a thousand requests that queue up in one burst ask for one."""
PLANNING_SHARE = 0.25
"""Of this process's time, at most: balancer and router share it with a planner that may think for long."""
LOAD_EVENT_SPACING_S = 0.5
EVENING_SPACING_S = 1.0
"""Sequences that move need a moment to arrive."""
STATS_TIMEOUT_S = 2.0


class Controller:
    """Moves slots between roles while a run goes on.

    Args:
        table: all slots, engines asleep.
        engines: one port for each (slot, inference role) that the slots can host.
        admissions: who hands requests to the engines of each inference role.
        planner: the decision rule.
        config: ``trainer.resource_shift``.
        events: the run's event log.
        clock: the run's clock; ``t_start_s`` of events is in its time.
        lengths: predicts lengths, for planners that look at them.

    An error inside the planner or a bug in a background task stops the controller: every later call, and every
    trainer that waits for the lease, gets a RuntimeError that names it.
    """

    def __init__(
        self,
        table: SlotTable,
        engines: Mapping[tuple[int, Role], EnginePort],
        admissions: Mapping[Role, AdmissionPort],
        planner: Planner,
        config: ResourceShiftConfig,
        events: EventSink,
        clock: Clock,
        lengths: LengthWatch | None = None,
    ) -> None:
        _require_ports(table, engines, admissions)
        self._table, self._admissions, self._planner = table, admissions, planner
        self._config, self._events, self._clock, self._lengths = config, events, clock, lengths
        self._tasks = TaskSet(self._on_task_error)
        self._lease = Lease(lambda: [s.describe() for s in table.blocking_training()], events, self.poke)
        ports = ShiftPorts(engines, admissions, clock, config.shift, self._version_of, events)
        self._executor = Executor(table, ports, self._lease, self._tasks, self.poke)
        self._monitor = LoadMonitor(
            table,
            engines,
            clock,
            timeout_s=STATS_TIMEOUT_S,
            silence_s=config.shift.drain_s,
            hides_dead=not config.shift.restart_failed,
        )
        self._version: int | None = None
        self._publishing = asyncio.Lock()
        self._evened_s: dict[Role, float] = {}
        self._training = TrainingWatch()
        self._reason_class: str | None = None
        self._poked = asyncio.Event()
        self._examinations: dict[int, asyncio.Task[None]] = {}
        self._error: BaseException | None = None
        self._stopped = False

    # ---- the run ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring every slot to its first role, then begin to plan.

        A slot that does not come up is failed and restarted in the background. Raises RuntimeError when a role that
        slots should begin with has none; ``stop`` then cleans up.
        """
        self._check_alive()
        self._mask_all()
        await self._executor.bring_up_all()
        self._check_alive()
        missing = {s.first_role for s in self._table.values()} - self._table.served_roles()
        if missing:
            slots = "; ".join(s.describe() for s in self._table.values() if s.first_role in missing)
            raise RuntimeError(f"no slot came up in role {', '.join(sorted(map(str, missing)))}: {slots}")
        self._tasks.spawn(self._watch())
        self._tasks.spawn(self._plan_forever())

    async def stop(self) -> None:
        """Mask all slots and end every task. Engines stay as they are; whoever waits for the lease gets an error."""
        self._stopped = True
        self._lease.close(RuntimeError("the controller was stopped"))
        await self._tasks.cancel_all()
        self._mask_all()
        if self._lengths is not None:
            self._take_sequences(self._lengths)
            for role, ledger in self._lengths.ledgers.items():
                self._events.emit("sequences", role=str(role), **ledger.counts())

    def poke(self) -> None:
        """Something changed: plan now instead of at the next interval. Costs nothing when called often."""
        self._poked.set()

    # ---- the trainer --------------------------------------------------------------------------------------------

    async def acquire_train(self, groups_ready: int, groups_needed: int) -> float:
        """Wait until training has all its slots; returns the seconds waited. Raises LeaseTimeout after
        ``train.lease_deadline_s``."""
        self._check_alive()
        self.train_progress(groups_ready, groups_needed)
        started_s = self._clock.now_s()
        await self._lease.acquire(self._config.train.lease_deadline_s)
        return self._clock.now_s() - started_s

    async def release_train(self) -> None:
        """Training gives its slots back."""
        self._check_alive()
        self._training.released(self._clock.now_s())
        self._lease.release()

    def train_progress(self, groups_ready: int, groups_needed: int, state: TrainerState | None = None) -> None:
        """How far the next (mini-)batch is, and what the trainer does. A batch that just became ready triggers a
        plan."""
        if state is not None:
            self._training.says(state, self._clock.now_s())
        if self._training.progress(groups_ready, groups_needed):
            self.poke()

    async def publish(self, version: int) -> dict[int, int]:
        """The store holds policy ``version``: make every awake rollout engine serve it, and return slot -> version.

        When this returns no admitted rollout engine has an older version; slots that come back to rollout later load
        the newest. At staleness 0 all engines load at once, since nothing runs; else a quarter of them at a time.
        Engines that do not take the version are failed and missing from the result. May be called before ``start``.
        Raises ValueError for a version older than the present one.
        """
        self._check_alive()
        async with self._publishing:
            if self._version is not None and version < self._version:
                raise ValueError(f"version {version} was published after version {self._version}")
            self._version = version
            share = 1 if self._config.staleness == 0 else 4
            await self._executor.serve_version(version, at_once=max(1, len(self._table) // share))
        self._check_alive()
        return {s.slot_id: v for s in self._table.serving(Role.ROLLOUT) if (v := s.versions[Role.ROLLOUT]) is not None}

    # ---- lost engines -------------------------------------------------------------------------------------------

    def engine_lost(self, slot_id: int, role: Role, error: str) -> None:
        """The engine's process is known to be gone: its slot fails now, if it serves with it, and recovers."""
        self._lose(LostEngine(self._table[slot_id], role, error, is_dead=True))

    async def examine(self, slot_id: int, role: Role, error: str) -> None:
        """A client had trouble with this engine: ask the engine itself, once for all who complain meanwhile.

        Returns when the engine has answered or its slot is out of service: a client that asks for another engine then
        does not get the same dead one.
        """
        slot = self._table[slot_id]
        if not slot.is_serving(role) or self._stopped:
            return
        if slot_id not in self._examinations:
            self._examinations[slot_id] = self._tasks.spawn(self._examine(slot, error))
        await self._tasks.settle([self._examinations[slot_id]])

    async def _examine(self, slot: Slot, suspicion: str) -> None:
        try:
            lost = await self._monitor.ask(slot)
            if lost is not None:
                self._lose(replace(lost, error=f"{suspicion}: {lost.error}"))
        finally:
            del self._examinations[slot.slot_id]

    def _lose(self, lost: LostEngine) -> None:
        if not self._stopped:
            self._executor.lose(lost)

    def hopeless(self) -> str | None:
        """Why the run cannot go on: the controller stopped, or a role has no slot left that could ever take it."""
        if self._error is not None:
            return f"the controller stopped working: {self._error!r}"
        given_up = self._executor.given_up
        for role in (Role.ROLLOUT, Role.GENRM):
            hosts = self._table.hosting(role)
            if hosts and all(slot.slot_id in given_up for slot in hosts):
                reasons = "; ".join(f"slot {slot.slot_id}: {given_up[slot.slot_id]}" for slot in hosts)
                return f"no slot is left that could serve {role}: {reasons}"
        return None

    # ---- looking and planning -----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All that the planner sees, as of now."""
        now_s = self._clock.now_s()
        snapshot = Snapshot(
            now_s=now_s,
            slots=self._monitor.views(),
            demand=demand_of(self._admissions),
            train=self._training.view(self._lease.state, now_s),
            decode=self._monitor.decode_costs(),
            shift_costs=self._executor.costs(),
            policy_version=self._version or 0,
            last_shift_s=self._executor.last_shift_s,
            staleness=self._config.staleness,
        )
        return snapshot if self._lengths is None else self._lengths.fill(snapshot, self._monitor)

    def whereabouts(self) -> str:
        """Where slots and requests are, in a sentence for whoever waits."""
        slots = "; ".join(s.describe() for s in self._table.values() if s.status is not SlotStatus.SERVING)
        demand = demand_of(self._admissions)
        requests = ", ".join(f"{role} runs {d.inflight} and {d.queued} wait" for role, d in demand.items())
        is_idle = not any(d.inflight or d.queued for d in demand.values())
        hint = ", so what is left is in agent loops or reward functions" if is_idle else ""
        return f"{slots or 'every slot has its role'}; requests: {requests}{hint}"

    def status(self) -> dict[str, Any]:
        """Plain values for people and tests."""
        demand = demand_of(self._admissions)
        return {
            "slots": {slot.slot_id: slot.as_dict() for slot in self._table.values()},
            "lease": str(self._lease.state),
            "policy_version": self._version,
            "queued": {str(role): waiting.queued for role, waiting in demand.items()},
            "inflight": {str(role): waiting.inflight for role, waiting in demand.items()},
            "error": None if self._error is None else repr(self._error),
        }

    async def _plan_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._poked.clear()
            took_s = self._plan_once()
            await asyncio.sleep(max(PLAN_SPACING_S, took_s / PLANNING_SHARE))
            timer = loop.call_later(self._config.planner.interval_s, self.poke)
            try:
                await self._poked.wait()
            finally:
                timer.cancel()

    def _plan_once(self) -> float:
        """Look, decide and begin without an await between: what was decided still holds when it begins. Returns the
        seconds that it took to look and to decide."""
        started_s = self._clock.now_s()
        plan = self._planner.plan(self.snapshot())
        took_s = self._clock.now_s() - started_s
        told = reason_class(plan.reason)
        if plan.shifts or told != self._reason_class:
            self._reason_class = told
            self._events.emit("plan", reason=plan.reason, shifts=len(plan.shifts), took_s=took_s)
        for shift in plan.shifts:
            self._executor.begin(shift)
        return took_s

    async def _watch(self) -> None:
        emitted_s = float("-inf")
        while True:
            for lost in await self._monitor.collect():
                self._lose(lost)
            if self._lengths is not None:
                self._take_sequences(self._lengths)
            for seconds in self._monitor.take_first_tokens_s():
                self._executor.add_migration(seconds)
            self._even_out()
            if self._clock.now_s() - emitted_s >= LOAD_EVENT_SPACING_S:
                emitted_s = self._clock.now_s()
                self._events.emit("load", **self._monitor.event(demand_of(self._admissions)))
            await asyncio.sleep(self._config.engine.stats_interval_s)

    def _take_sequences(self, lengths: LengthWatch) -> None:
        queued = {role: admission.queued_sequences() for role, admission in self._admissions.items()}
        lengths.take(self._monitor.take_sequences(), queued, self._version or 0, self._clock.now_s())

    def _even_out(self) -> None:
        """Where one slot of a role runs many sequences and another few, some move; requests that wait do it better."""
        now_s = self._clock.now_s()
        for role, admission in self._admissions.items():
            serving = self._table.serving(role)
            if admission.queued() or now_s < self._evened_s.get(role, float("-inf")) + EVENING_SPACING_S:
                continue
            given = admission.inflight()
            counts = {slot.slot_id: given.get(slot.slot_id, 0) for slot in serving}
            too_many = excess(counts, self._monitor.decode_costs().get(role), self._running_like(role))
            for slot_id, count in too_many.items():
                self._evened_s[role] = now_s
                self._executor.shed(self._table[slot_id], role, count)

    def _running_like(self, role: Role) -> Sequences:
        """What one running sequence is like, on average. Without lengths its prompt is not told from its answer.
        A judgement that is moved begins again."""
        context, first_token_s = self._monitor.context_tokens(role), self._monitor.undelayed_first_token_s()
        prompt = self._lengths.forecast.roles[role].prompt_tokens if self._lengths is not None else 0.0
        so_far = max(1.0, context - prompt)
        return Sequences(context, so_far, first_token_s.get(role, 0.0), so_far if role in BEGINS_AGAIN else 0.0)

    # ---- plumbing -----------------------------------------------------------------------------------------------

    def _version_of(self, role: Role) -> int | None:
        return self._version if role is Role.ROLLOUT else None

    def _mask_all(self) -> None:
        for slot in self._table.values():
            self._executor.mask(slot)

    def _on_task_error(self, error: BaseException) -> None:
        logger.error("the controller stopped working", exc_info=error)
        if self._error is None:
            self._error = error
            self._lease.close(RuntimeError(f"the controller stopped working: {error!r}"))

    def _check_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the controller stopped working: {self._error!r}") from self._error
        if self._stopped:
            raise RuntimeError("the controller was stopped")


def _require_ports(
    table: SlotTable, engines: Mapping[tuple[int, Role], EnginePort], admissions: Mapping[Role, AdmissionPort]
) -> None:
    for slot in table.values():
        for role in slot.inference_roles:
            if (slot.slot_id, role) not in engines or role not in admissions:
                raise ValueError(f"slot {slot.slot_id} can host {role}, but got no engine or no admission for it")
