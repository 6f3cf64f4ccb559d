"""How the runtime reaches the outside.

Every Protocol here is implemented twice: for real (engines in ``verl_ext.engines``, admission in ``runtime.admission``,
events and clock in ``observe.events``) and by small fakes in ``tests/runtime``. All coroutines run in the control
plane's one event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verl_pivot.core.sequences import SequenceReport, SequenceState
from verl_pivot.core.snapshot import ReplicaLoad, Role


class EngineError(RuntimeError):
    """An engine operation failed or the engine is gone; the message names slot, role and operation."""


class EngineDead(EngineError):
    """The engine's process is gone; only ``restart`` can bring it back."""


class EnginePort(Protocol):
    """All engines of one inference role on one slot (several when the slot is larger than one replica)."""

    slot_id: int
    role: Role

    async def drain(self) -> int:
        """Close admission, abort every sequence so that its client gets its partial tokens, and return once the
        engines acknowledge being idle. Returns the number of sequences aborted."""

    async def sleep(self) -> None:
        """Free weights and KV. The engine must be idle; one that is asleep, or whose load or wake failed half way,
        ends up asleep too."""

    async def load(self, version: int | None) -> int:
        """Load weights of ``version`` (None: the judge's own, or the newest published) from the parameter store into
        an engine that is asleep, or awake and idle; returns the version that the engine itself reports."""

    async def wake(self) -> None:
        """Restore KV, reset caches and open admission. Weights must have been loaded. On an engine that is awake (its
        drain failed, or it loaded a new version) it does the same, and sequences that still run go on."""

    async def shed(self, count: int) -> int:
        """Abort up to ``count`` sequences, those with the fewest tokens, so that their clients go on elsewhere; the
        others run on. Returns how many that were."""

    async def stats(self) -> ReplicaLoad:
        """Load since the last call. Raises EngineDead when the process is gone."""

    def sequences(self) -> SequenceReport:
        """What the last ``stats`` told of sequences one by one, and what ended since this was last called, drains
        included. Costs no question. Nothing where the run does not predict lengths."""

    async def kill(self) -> None:
        """End the engine processes, answering or not, so that their memory is free and their clients see an error and
        go elsewhere. Idempotent: processes that are gone already, some or all, are no error. Used when an engine
        neither sleeps nor serves."""

    async def restart(self) -> None:
        """Replace dead or killed engine processes by new ones, asleep. Idempotent."""


class AdmissionPort(Protocol):
    """Who hands requests of one inference role to engines: the rollout balancer or the judge router."""

    def mask(self, slot_id: int) -> None:
        """No new request goes to the slot's engines. Idempotent."""

    def admit(self, slot_id: int) -> None:
        """The slot's engines take requests again. Idempotent."""

    def queued(self) -> int:
        """Requests that wait because no engine is admitted (or none has room)."""

    def queued_sequences(self) -> list[SequenceState]:
        """Of these requests, those whose clients say which sequence they are for."""

    def inflight(self) -> Mapping[int, int]:
        """Requests handed to each slot and not yet answered."""


class EventSink(Protocol):
    """Where the runtime tells what it does: the JSONL event log of the run (``observe.events``)."""

    def emit(self, kind: str, **fields: Any) -> None: ...


class Clock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float: ...
