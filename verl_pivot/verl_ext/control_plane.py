"""The control plane: one Ray actor that holds balancer, judge router and controller in one event loop.

Masking a slot, aborting its sequences and admitting them elsewhere are then steps of one process, not messages between
four. Agent loops call it as verl's balancer, reward workers reach its HTTP router, the trainer asks for its lease and
publishes versions here. It owns no engine and no weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.core.registry import PlannerSettings, looks_at_lengths, make_planner
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.observe.events import EventLog
from verl_pivot.observe.metrics import RunningMetrics
from verl_pivot.runtime.controller import Controller
from verl_pivot.runtime.cpu_share import CpuShares
from verl_pivot.runtime.lengths import LengthOptions, LengthWatch
from verl_pivot.runtime.ports import AdmissionPort, EngineDead, EngineError
from verl_pivot.runtime.slots import Slot, SlotTable
from verl_pivot.runtime.training import TrainerState
from verl_pivot.store import ParameterStore
from verl_pivot.verl_ext.balancer import ShiftBalancer
from verl_pivot.verl_ext.engines import EngineGroup, ServerRecord

logger = logging.getLogger(__name__)

SLEEPER_INTERVAL_S = 2.0
SLEEPER_TIMEOUT_S = 5.0


@dataclass
class SlotDescription:
    """What the trainer tells about one slot after launching its engines."""

    slot_id: int
    first_role: str
    can_host: tuple[str, ...]
    servers: dict[str, list[tuple[str, Any, str]]] = field(default_factory=dict)
    """For each inference role: (server id, handle, HTTP url)."""


@dataclass(frozen=True)
class Workload:
    """What the run's options say of requests; the mappings are by inference role."""

    batch_limits: dict[str, int]
    """Sequences that one engine runs at a time."""
    max_tokens: dict[str, int]
    """Tokens of one response, and of one judgement, at most."""
    responses_per_prompt: int


class ControlPlane:
    """Async Ray actor.

    Args:
        config: ``trainer.resource_shift``.
        run_dir: where events go.
        store_dir: this run's folder in the parameter store (owned by the trainer process).
        t0_unix_s: start of the run, common to all its event logs.
        with_judge: whether a generative reward model takes part.
        cpu_slots: number of slots with a fixed CPU share; 0 on GPUs.
        workload: what the run's options say of requests.
    """

    def __init__(
        self,
        config: ResourceShiftConfig,
        run_dir: str,
        store_dir: str,
        t0_unix_s: float,
        with_judge: bool,
        cpu_slots: int,
        workload: Workload,
    ) -> None:
        self._config = config
        self._log = EventLog(Path(run_dir) / "events.jsonl", t0_unix_s=t0_unix_s)
        self._metrics = RunningMetrics()
        self._log.subscribe(self._metrics.observe)
        self._store = ParameterStore.attach(store_dir, config.store)
        self._balancer = ShiftBalancer()
        self._router: Any = None
        self._with_judge = with_judge
        self._workload = workload
        self._batch_limits = {Role(role): limit for role, limit in workload.batch_limits.items()}
        self._lengths: LengthWatch | None = None
        self._shares = CpuShares.create(Path(store_dir).name, cpu_slots, config.slots.cpu_share) if cpu_slots else None
        self._controller: Controller | None = None
        self._groups: dict[tuple[int, Role], EngineGroup] = {}
        self._background: set[asyncio.Task[None]] = set()

    # ---- wiring -------------------------------------------------------------------------------------------------

    async def start_router(self) -> str | None:
        """Serve the judge's HTTP API; returns ``host:port``, or None without a judge."""
        if not self._with_judge:
            return None
        from verl.workers.rollout.utils import run_uvicorn

        from verl_pivot.verl_ext.judge_router import JudgeRouter

        self._router = JudgeRouter(self._config.judge)
        address = ray.util.get_node_ip_address().strip("[]")
        port, self._router_task = await run_uvicorn(self._router.app, None, address)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    async def configure(self, slots: list[SlotDescription], run_start: dict[str, Any]) -> None:
        """Take over the launched engines, all asleep, and build the controller."""
        table = SlotTable(
            Slot(s.slot_id, Role(s.first_role), frozenset(Role(role) for role in s.can_host)) for s in slots
        )
        admissions = {Role.ROLLOUT: self._balancer.queue}
        if self._router is not None:
            admissions[Role.GENRM] = self._router.queue
        for description in slots:
            for role_name, servers in description.servers.items():
                self._adopt(description.slot_id, Role(role_name), servers, admissions)
        if looks_at_lengths(self._config.planner.name):
            self._lengths = LengthWatch(self._length_options())
        self._log.emit("run_start", **run_start)
        self._controller = Controller(
            table=table,
            engines=self._groups,
            admissions=admissions,
            planner=make_planner(self._config.planner.name, PlannerSettings(**_planner_fields(self._config))),
            config=self._config,
            events=self._log,
            clock=self._log,
            lengths=self._lengths,
        )
        for queue in admissions.values():
            queue.on_demand = self._controller.poke
        if self._router is not None:
            self._router.on_suspect = lambda slot_id, error: self._running().examine(slot_id, Role.GENRM, error)
        for slot_id, role in self._groups:
            await self._place(slot_id, role)

    def _adopt(
        self, slot_id: int, role: Role, servers: list[tuple[str, Any, str]], admissions: Mapping[Role, AdmissionPort]
    ) -> None:
        records = [ServerRecord(server_id, handle, url) for server_id, handle, url in servers]
        for record in records:
            if role is Role.ROLLOUT:
                self._balancer.register(record.server_id, record.handle, slot_id, self._batch_limits[role])
            else:
                self._router.register(record.url, slot_id, self._batch_limits[role])
        self._groups[slot_id, role] = EngineGroup(
            slot_id,
            role,
            records,
            self._store,
            "policy" if role is Role.ROLLOUT else "judge",
            admissions[role],
            lambda record, old_url: self._on_relaunch(slot_id, role, record, old_url),
            tells_sequences=looks_at_lengths(self._config.planner.name),
        )

    def _length_options(self) -> LengthOptions:
        per_slot = {role: max((len(g) for (_, r), g in self._groups.items() if r is role), default=1) for role in Role}
        return LengthOptions(
            max_tokens={role: self._workload.max_tokens.get(role, 1) for role in INFERENCE_ROLES},
            batch_limits={role: per_slot[role] * self._batch_limits.get(role, 1) for role in INFERENCE_ROLES},
            responses_per_prompt=self._workload.responses_per_prompt,
            refresh_s=self._config.planner.interval_s,
        )

    async def _place(self, slot_id: int, role: Role) -> None:
        """Write down which processes a slot's engines are, and put them into its CPU share where there are any."""
        try:
            pids = await self._groups[slot_id, role].pids()
        except EngineError:
            if self._shares is not None:
                raise
            # Only needed to end an engine whose front end is gone; no reason not to run.
            logger.warning(
                "resource_shift: processes of slot %d's %s engines are not known", slot_id, role, exc_info=True
            )
            return
        if self._shares is not None:
            for pid in pids:
                self._shares.place(slot_id, pid)
        self._log.emit("engine", slot=slot_id, role=str(role), pids=pids)

    def _on_relaunch(self, slot_id: int, role: Role, record: ServerRecord, old_url: str) -> None:
        if role is Role.GENRM:
            self._router.register(record.url, slot_id, self._batch_limits[role], replaces=old_url)
        self._in_background(self._place(slot_id, role))

    async def place_trainer(self, pids_of_slot: dict[int, list[int]]) -> str:
        """Put the actor's processes into their slots' CPU share; returns what is enforced."""
        if self._shares is None:
            return "accelerator slots"
        for slot_id, pids in pids_of_slot.items():
            for pid in pids:
                self._shares.place(slot_id, pid)
        return self._shares.describe()

    async def start(self) -> None:
        """Bring every slot to its first role; a policy version must have been published."""
        await self._running().start()
        self._in_background(self._watch_sleepers())

    async def _watch_sleepers(self) -> None:
        """An engine that dies asleep must be known before a shift wants it; the controller asks those that serve."""
        while True:
            await asyncio.sleep(SLEEPER_INTERVAL_S)
            for (slot_id, role), group in self._groups.items():
                try:
                    await asyncio.wait_for(group.require_alive(), SLEEPER_TIMEOUT_S)
                except EngineDead as error:
                    self._running().engine_lost(slot_id, role, str(error))
                except (TimeoutError, EngineError):
                    continue  # whoever uses the engine next gets this error

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task of the control plane failed", exc_info=task.exception())

    async def stop(self) -> None:
        """End of the run: no task, no CPU group and no HTTP server stays."""
        if self._controller is not None:
            await self._controller.stop()
        for waiter in list(self._background):
            waiter.cancel()
        if self._router is not None:
            self._router_task.cancel()
        if self._shares is not None:
            self._shares.close()
        self._log.close()

    # ---- the trainer --------------------------------------------------------------------------------------------

    async def acquire_train(self, groups_ready: int, groups_needed: int) -> float:
        """Wait until training has its slots; returns the seconds that took."""
        return await self._running().acquire_train(groups_ready, groups_needed)

    async def release_train(self) -> None:
        await self._running().release_train()

    async def train_progress(self, groups_ready: int, groups_needed: int, state: TrainerState) -> None:
        self._running().train_progress(groups_ready, groups_needed, state)

    async def publish(self, version: int) -> dict[int, int]:
        """A new policy version is in the store: every awake rollout engine serves it when this returns."""
        return await self._running().publish(version)

    async def length_state(self) -> dict[str, Any] | None:
        """What was learned of lengths; None in runs that do not predict them."""
        return None if self._lengths is None else self._lengths.state()

    async def load_length_state(self, state: Any) -> str | None:
        """Go on with what an earlier run learned; returns what is wrong with it when it cannot be used."""
        try:
            if self._lengths is not None:
                self._lengths.load(state)
        except ValueError as error:
            return str(error)
        return None

    async def hopeless(self) -> str | None:
        """Why the run cannot go on; None while it can."""
        return self._running().hopeless()

    async def whereabouts(self) -> str:
        """Where slots and requests are, in a sentence for whoever waits."""
        return self._running().whereabouts()

    async def status(self) -> dict[str, Any]:
        return self._running().status()

    async def metrics(self) -> dict[str, float]:
        """``resource_shift/*`` scalars since the last call."""
        values = self._metrics.collect(self._log.now_s())
        if self._router is not None:
            values["resource_shift/judge_requests_resubmitted"] = float(self._router.take_resubmitted())
        return values

    # ---- verl's balancer protocol (verl/workers/rollout/router.py) -----------------------------------------------

    async def acquire_server(
        self, request_id: str, resumes: bool = False, sequence: tuple[str, str, int, int] | None = None
    ) -> tuple[str, Any]:
        return await self._balancer.acquire(request_id, resumes, sequence)

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._balancer.release_server(server_id, request_id)

    async def require_acquire_fields(self) -> list[str]:
        return self._balancer.require_acquire_fields()

    async def require_release_fields(self) -> list[str]:
        return self._balancer.require_release_fields()

    async def get_status(self) -> dict[str, Any]:
        return self._balancer.get_status()

    async def get_all_servers(self) -> list[str]:
        return self._balancer.get_all_servers()

    async def get_total_inflight(self) -> int:
        return self._balancer.get_total_inflight()

    async def clear_sticky_cache(self) -> dict[str, Any]:
        return self._balancer.clear_sticky_cache()

    async def report_lost(self, request_id: str) -> None:
        """A client lost its server while generating."""
        slot_id = self._balancer.slot_of_request(request_id)
        if slot_id is not None:
            await self._running().examine(slot_id, Role.ROLLOUT, "a client lost its engine")

    # ---- events -------------------------------------------------------------------------------------------------

    async def observe(self, event: dict[str, Any]) -> None:
        """An event that the trainer wrote to its own log, for the metrics."""
        self._metrics.observe(event)

    def _running(self) -> Controller:
        if self._controller is None:
            raise RuntimeError("the control plane has no slots yet: configure() comes first")
        return self._controller


def _planner_fields(config: ResourceShiftConfig) -> dict[str, Any]:
    return {name: getattr(config.planner, name) for name in PlannerSettings.__dataclass_fields__}
