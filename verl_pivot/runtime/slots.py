"""Slots and their state: who has which GPUs, and which engines on them hold memory.

Pure state, no IO: the shift transaction and the controller (control-plane process) drive it, everyone else reads.
A slot is ``serving`` a role, ``shifting`` between two, or ``failed``. Past the commit point of a shift it belongs to
nobody. Beside that a slot records the state of each of its engines, because two engines of one slot must never hold
memory at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from enum import StrEnum
from typing import Any

from verl_pivot.core.snapshot import Role, SlotStatus


class SlotError(RuntimeError):
    """A transition that the slot's state does not allow; the message names slot, state and transition."""


class EngineState(StrEnum):
    """What one engine of a slot does with the slot's memory."""

    ASLEEP = "asleep"
    AWAKE = "awake"
    UNSETTLED = "unsettled"
    """Between asleep and awake, or an operation on it failed half way: assume that it holds memory."""
    DEAD = "dead"
    """Its processes are gone, all of them."""

    def __str__(self) -> str:
        return self.value

    @property
    def frees_memory(self) -> bool:
        return self in (EngineState.ASLEEP, EngineState.DEAD)


class Slot:
    """One slot. Starts as ``shifting`` to its first role, past the commit point, with all engines asleep.

    ``role`` is the present role; while shifting the role it came from; when failed the role it had.
    ``since_s`` is when it took that role. ``versions`` holds what each engine reported when it last loaded.
    """

    def __init__(self, slot_id: int, first_role: Role, can_host: Iterable[Role], now_s: float = 0.0) -> None:
        self.slot_id = slot_id
        self.can_host = frozenset(can_host)
        self.first_role = first_role
        if first_role not in self.can_host:
            raise SlotError(f"slot {slot_id}: its first role is {first_role}, but it can host only {self._hosts}")
        self.role = first_role
        self.status = SlotStatus.SHIFTING
        self.target: Role | None = first_role
        self.committed = True
        self.since_s = now_s
        self.failure: str | None = None
        self.epoch = 0
        """Transitions so far: what was asked of the slot in an earlier epoch says nothing about this one."""
        self.engines: dict[Role, EngineState] = {r: EngineState.ASLEEP for r in self.inference_roles}
        self.versions: dict[Role, int | None] = dict.fromkeys(self.inference_roles)

    # Queries

    @property
    def inference_roles(self) -> tuple[Role, ...]:
        """Roles this slot has an engine for."""
        return tuple(r for r in Role if r in self.can_host and r is not Role.TRAIN)

    @property
    def memory_free(self) -> bool:
        """No engine holds the slot's memory."""
        return all(state.frees_memory for state in self.engines.values())

    @property
    def is_free_for_training(self) -> bool:
        """In role train, or failed with its memory free: a lost engine must not hold up training."""
        if self.status is SlotStatus.FAILED:
            return self.memory_free
        return self.is_serving(Role.TRAIN)

    def is_serving(self, role: Role) -> bool:
        return self.status is SlotStatus.SERVING and self.role is role

    def describe(self) -> str:
        """State in words, for error messages."""
        engines = ", ".join(f"{r} engine {s}" for r, s in self.engines.items()) or "no engines"
        if self.status is SlotStatus.SHIFTING:
            where = f"shifting {self.role}->{self.target}" + (" past its commit point" if self.committed else "")
        else:
            where = f"{self.status} {self.role}" if self.status is SlotStatus.SERVING else f"failed ({self.failure})"
        return f"slot {self.slot_id} ({where}; {engines})"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the controller's status."""
        return {
            "role": str(self.role),
            "status": str(self.status),
            "target": None if self.target is None else str(self.target),
            "failure": self.failure,
            "engines": {str(role): str(state) for role, state in self.engines.items()},
            "versions": {str(role): version for role, version in self.versions.items()},
        }

    # Transitions

    def begin_shift(self, target: Role) -> None:
        """serving -> shifting towards another role. The old role keeps the slot until ``commit``."""
        self._require("begin_shift", self.status is SlotStatus.SERVING, f"to {target}: only a serving slot can shift")
        self._require("begin_shift", target in self.can_host, f"to {target}: it can host {self._hosts}")
        self._require("begin_shift", target is not self.role, f"to {target}: it has that role")
        self._enter(SlotStatus.SHIFTING, target)

    def begin_refresh(self) -> None:
        """serving -> shifting to the same role: the engine takes new weights."""
        ok = self.status is SlotStatus.SERVING and self.role in self.engines
        self._require("begin_refresh", ok, "only a serving engine takes new weights")
        self._enter(SlotStatus.SHIFTING, self.role)

    def commit(self) -> None:
        """From here on the slot belongs to nobody; needs its memory free."""
        ok = self.status is SlotStatus.SHIFTING and not self.committed and self.target is not self.role
        self._require("commit", ok, "only a shift to another role commits, once")
        self._require("commit", self.memory_free, "an engine still holds memory")
        self.committed = True

    def finish(self, now_s: float) -> None:
        """shifting -> serving the target."""
        refresh = self.target is self.role and not self.committed
        ok = self.status is SlotStatus.SHIFTING and (self.committed or refresh)
        self._require("finish", ok, "only a committed shift or a refresh finishes")
        assert self.target is not None
        self._require_ready("finish", self.target)
        self.role = self.target
        self._enter(SlotStatus.SERVING)
        if not refresh:
            self.since_s = now_s

    def roll_back(self, now_s: float) -> None:
        """shifting -> serving the role it came from, before or after the commit point."""
        ok = self.status is SlotStatus.SHIFTING and self.target is not self.role
        self._require("roll_back", ok, "only a shift to another role rolls back")
        self._require_ready("roll_back", self.role)
        self._enter(SlotStatus.SERVING)
        self.since_s = now_s

    def fail(self, reason: str) -> None:
        """serving or shifting -> failed. Engines that were awake count as unsettled from now on."""
        self._require("fail", self.status is not SlotStatus.FAILED, f"({reason}): it has failed already")
        self._enter(SlotStatus.FAILED)
        self.failure = reason
        for role, state in self.engines.items():
            if state is EngineState.AWAKE:
                self.engines[role] = EngineState.UNSETTLED

    def recover(self, role: Role) -> None:
        """failed -> shifting to ``role``, past the commit point; needs its memory free."""
        self._require("recover", self.status is SlotStatus.FAILED, "only a failed slot recovers")
        self._require("recover", role in self.can_host, f"as {role}: it can host {self._hosts}")
        self._require("recover", self.memory_free, f"as {role}: an engine still holds memory")
        self._enter(SlotStatus.SHIFTING, role)
        self.role, self.committed, self.failure = role, True, None

    def set_engine(self, role: Role, state: EngineState) -> None:
        """Record an engine's state. Two engines of one slot never hold memory at once."""
        self._require("set_engine", role in self.engines, f"{role}: it has no such engine")
        if not state.frees_memory:
            others = [str(r) for r, s in self.engines.items() if r is not role and not s.frees_memory]
            self._require("set_engine", not others, f"{role} {state}: the {', '.join(others)} engine holds its memory")
        if state is EngineState.AWAKE:
            self._require("set_engine", self.status is SlotStatus.SHIFTING, f"{role} awake: the slot is not shifting")
        self.engines[role] = state

    # Checks

    def check(self) -> None:
        """Raise SlotError when the state contradicts itself."""
        holding = [str(r) for r, s in self.engines.items() if not s.frees_memory]
        self._require("check", len(holding) <= 1, f"several engines hold memory: {', '.join(holding)}")
        self._require("check", (self.status is SlotStatus.SHIFTING) == (self.target is not None), "stray target")
        self._require("check", not self.committed or self.status is SlotStatus.SHIFTING, "stray commit point")
        self._require("check", (self.status is SlotStatus.FAILED) == (self.failure is not None), "stray failure")
        if self.status is SlotStatus.SERVING:
            self._require_ready("check", self.role)

    def _enter(self, status: SlotStatus, target: Role | None = None) -> None:
        self.status, self.target, self.committed = status, target, False
        self.epoch += 1

    def _require_ready(self, transition: str, role: Role) -> None:
        if role is Role.TRAIN:
            self._require(transition, self.memory_free, "an engine holds memory that training needs")
        else:
            awake = self.engines[role] is EngineState.AWAKE
            self._require(transition, awake, f"the {role} engine is {self.engines[role]}")

    def _require(self, transition: str, ok: bool, why: str) -> None:
        if not ok:
            raise SlotError(f"{self.describe()}: {transition} refused: {why}")

    @property
    def _hosts(self) -> str:
        return ", ".join(str(r) for r in Role if r in self.can_host)


class SlotTable:
    """All slots of a run, by id."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots: dict[int, Slot] = {}
        for slot in slots:
            if slot.slot_id in self._slots:
                raise SlotError(f"two slots have the id {slot.slot_id}")
            self._slots[slot.slot_id] = slot

    def __getitem__(self, slot_id: int) -> Slot:
        if slot_id not in self._slots:
            raise SlotError(f"there is no slot {slot_id}; slots: {sorted(self._slots)}")
        return self._slots[slot_id]

    def __len__(self) -> int:
        return len(self._slots)

    def values(self) -> ValuesView[Slot]:
        return self._slots.values()

    def serving(self, role: Role) -> list[Slot]:
        return [s for s in self.values() if s.is_serving(role)]

    def served_roles(self) -> set[Role]:
        return {s.role for s in self.values() if s.status is SlotStatus.SERVING}

    def hosting(self, role: Role) -> list[Slot]:
        """Slots that can take ``role``, whatever they do now."""
        return [s for s in self.values() if role in s.can_host]

    def blocking_training(self) -> list[Slot]:
        """Slots of the train unit that training cannot use yet."""
        return [s for s in self.hosting(Role.TRAIN) if not s.is_free_for_training]

    def check(self) -> None:
        """Raise SlotError when a slot's state contradicts itself."""
        for slot in self.values():
            slot.check()
