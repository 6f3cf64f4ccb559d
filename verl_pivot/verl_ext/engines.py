"""All engines of one role on one slot, behind ``runtime.ports.EnginePort``. Lives in the control-plane actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from verl_pivot.core.sequences import SequenceEnd, SequenceReport, SequenceState
from verl_pivot.core.snapshot import ReplicaLoad, Role
from verl_pivot.runtime.ports import AdmissionPort, EngineDead, EngineError
from verl_pivot.store import ParameterStore
from verl_pivot.verl_ext import processes
from verl_pivot.verl_ext.engine_death import engine_died

_LEFTOVER_INTERVAL_S = 0.01
_DEATH_INTERVAL_S = 1.0


@dataclass
class ServerRecord:
    """One server of a slot: how to call it and where its HTTP front end is."""

    server_id: str
    handle: Any
    url: str


class EngineGroup:
    """Implements ``EnginePort`` over server handles (``ShiftHttpServer``).

    Args:
        model: name of the weights in the parameter store, ``policy`` or ``judge``.
        admission: who hands requests to these engines; its in-flight count tells when a drain is complete.
        on_relaunch: called with (record, old_url) after a dead engine was replaced.
        tells_sequences: whether engines report each sequence; costs some milliseconds a report where there are many.
    """

    def __init__(
        self,
        slot_id: int,
        role: Role,
        servers: list[ServerRecord],
        store: ParameterStore,
        model: str,
        admission: AdmissionPort,
        on_relaunch: Callable[[ServerRecord, str], None],
        tells_sequences: bool = False,
    ) -> None:
        self.slot_id = slot_id
        self.role = role
        self._servers = servers
        self._store = store
        self._model = model
        self._admission = admission
        self._on_relaunch = on_relaunch
        self._tells_sequences = tells_sequences
        self._running: tuple[SequenceState, ...] = ()
        self._ended: list[SequenceEnd] = []
        self._families: dict[str, list[psutil.Process]] = {}

    def __len__(self) -> int:
        return len(self._servers)

    async def drain(self) -> int:
        aborted = await self._step("drain")
        # A judge request may have been on its way over HTTP when the engine closed.
        while self.role is Role.GENRM and self._admission.inflight().get(self.slot_id, 0) > 0:
            aborted = [*aborted, *await self._call("abort_leftovers")]
            await asyncio.sleep(_LEFTOVER_INTERVAL_S)
        if self._tells_sequences:
            self._note(await self._call("sequence_report"))
        return sum(aborted)

    async def sleep(self) -> None:
        await self._step("sleep_engine")

    async def load(self, version: int | None) -> int:
        with self._store.open_version(self._model, version) as reader:
            versions = await self._step("load_weights", str(reader.path), reader.version)
        if set(versions) != {reader.version}:
            raise EngineError(f"slot {self.slot_id} {self.role}: asked for version {reader.version}, serves {versions}")
        return reader.version

    async def wake(self) -> None:
        await self._step("wake_engine")

    async def shed(self, count: int) -> int:
        each, more = divmod(count, len(self._servers))
        shares = [each + (number < more) for number in range(len(self._servers))]
        shed = [self._one(record, "shed", share) for record, share in zip(self._servers, shares, strict=True) if share]
        return sum(await asyncio.gather(*shed))

    async def stats(self) -> ReplicaLoad:
        reports = await self._call("load_report", self._tells_sequences)
        if any(report["dead"] for report in reports):
            raise self._gone()
        self._note(reports)
        return ReplicaLoad(
            running=sum(report["running"] for report in reports),
            waiting=sum(report["waiting"] for report in reports),
            context_tokens=sum(report["context_tokens"] for report in reports),
            tokens_per_s=sum(report["tokens_per_s"] for report in reports),
            first_token_s=max(report["first_token_s"] for report in reports),
            kv_tokens=sum(report["kv_tokens"] for report in reports),
        )

    def sequences(self) -> SequenceReport:
        ended, self._ended = tuple(self._ended), []
        return SequenceReport(self._running, ended)

    def _note(self, reports: list[dict[str, Any]]) -> None:
        self._running = tuple(SequenceState(*state) for report in reports for state in report.get("sequences", ()))
        self._ended.extend(SequenceEnd(*end) for report in reports for end in report.get("ended", ()))

    async def require_alive(self) -> None:
        """Raises EngineDead when a process of these engines is gone; asks no more of them than that."""
        if any(await self._call("is_dead")):
            raise self._gone()

    async def kill(self) -> None:
        """Also of engines whose front end no longer answers or is gone: nothing of them may hold memory."""
        for record in self._servers:
            try:
                await self._one(record, "kill_engine")
            except EngineDead:  # then its processes have nobody else to end them
                await processes.end(self._families.get(record.server_id, []))

    async def restart(self) -> None:
        for record in self._servers:
            if not await self._one(record, "is_dead"):
                continue
            address, port = await self._one(record, "relaunch")
            host = f"[{address}]" if ":" in address else address
            old_url, record.url = record.url, f"http://{host}:{port}"
            self._on_relaunch(record, old_url)

    async def pids(self) -> list[int]:
        """Processes that compute for these engines, on this node. Remembered: their front end may go before them."""
        of_servers = await self._call("engine_pids")
        for record, pids in zip(self._servers, of_servers, strict=True):
            self._families[record.server_id] = processes.family_of(pids)
        return [pid for pids in of_servers for pid in pids]

    def _gone(self) -> EngineDead:
        return EngineDead(f"slot {self.slot_id} {self.role}: an engine process is gone")

    async def _step(self, method: str, *args: Any) -> list[Any]:
        """``_call`` for what the engine's own process must answer: vLLM waits for ever when that dies meanwhile."""
        work = asyncio.ensure_future(self._call(method, *args))
        try:
            while not (await asyncio.wait({work}, timeout=_DEATH_INTERVAL_S))[0]:
                await self.require_alive()
            return work.result()
        finally:
            work.cancel()

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*[self._one(record, method, *args) for record in self._servers]))

    async def _one(self, record: ServerRecord, method: str, *args: Any) -> Any:
        where = f"slot {self.slot_id} {self.role}: {method}"
        try:
            return await getattr(record.handle, method).remote(*args)
        except ray.exceptions.RayActorError as error:
            raise EngineDead(f"{where}: the process that holds the engine is gone ({error})") from error
        except ray.exceptions.RayTaskError as error:
            if engine_died(error):
                raise EngineDead(f"{where}: the engine process is gone") from error
            raise EngineError(f"{where} failed: {error.cause!r}") from error
