"""Holds the compute processes of a run to their slots' CPU share, and reads how much each slot has used.

resource_shift holds its processes itself; for verl's own deployments the benchmark does it in the same way.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.deployments import processes
from benchmarks.deployments.processes import ComputeProcess, RunProcesses
from benchmarks.deployments.variants import SLOTS, Variant
from verl_pivot.runtime.cpu_share import CpuShares


class NotPlaced(RuntimeError):
    """A run's compute processes are not all held to a slot: its figures would mean nothing."""


class HeldByBenchmark:
    """For verl's own deployments. ``hold`` is called from the end of start-up on, again and again."""

    def __init__(self, variant: Variant, run: Path, share: float, found: RunProcesses) -> None:
        self._variant = variant
        self._found = found
        self._shares = CpuShares.create(run.name, SLOTS, share)
        self._placed: dict[int, ComputeProcess] = {}
        self._slot_of_gpu: dict[str, int] = {}

    def hold(self) -> None:
        """Place every compute process that is not placed yet. Raises NotPlaced when one is missing."""
        compute = self._found.compute()
        counts: dict[str, int] = {}
        for process in compute:
            counts[process.role] = counts.get(process.role, 0) + 1
        if any(counts.get(role, 0) < least for role, least in self._variant.compute_processes.items()):
            raise NotPlaced(f"compute processes by role: {counts}, expected {self._variant.compute_processes}")
        if not self._slot_of_gpu:
            self._slot_of_gpu = processes.gpu_to_slot([process.gpu for process in compute], SLOTS)
        for process in compute:
            if process.pid not in self._placed:
                self._shares.place(self._slot_of_gpu[process.gpu], process.pid)
                self._placed[process.pid] = process

    def usage_s(self) -> tuple[float, ...]:
        """CPU seconds of each slot so far; from process times where no control group counts them."""
        counted = [self._shares.usage_s(slot) for slot in range(SLOTS)]
        return tuple(
            processes.cpu_seconds(self._pids(slot)) if value is None else value for slot, value in enumerate(counted)
        )

    def role_usage_s(self) -> dict[str, float]:
        roles = {process.role for process in self._placed.values()}
        return {role: processes.cpu_seconds(p.pid for p in self._placed.values() if p.role == role) for role in roles}

    def describe(self) -> str:
        return f"{self._shares.describe()}, by the benchmark"

    def close(self) -> None:
        self._shares.close()

    def _pids(self, slot: int) -> list[int]:
        return [pid for pid, process in self._placed.items() if self._slot_of_gpu[process.gpu] == slot]


class HeldByRun:
    """For resource_shift, which places its processes itself; here they are only checked and read."""

    def __init__(self, variant: Variant, found: RunProcesses) -> None:
        self._variant = variant
        self._found = found
        self._groups: dict[int, Path] = {}
        self._last_s: tuple[float, ...] = ()

    def hold(self) -> None:
        """Raises NotPlaced unless every slot's group holds its two engines, and train slots their worker."""
        if not self._groups:
            self._groups = self._found.groups()
        expected = {slot: 2 + (slot < self._variant.train) for slot in range(SLOTS)}
        counts = {slot: len(processes.group_pids(group)) for slot, group in sorted(self._groups.items())}
        # An engine may start a helper for a moment, which then belongs to its slot as well.
        if any(counts.get(slot, 0) < least for slot, least in expected.items()):
            raise NotPlaced(f"processes in the slots' control groups: {counts}, expected {expected}")
        self.usage_s()

    def usage_s(self) -> tuple[float, ...]:
        try:
            self._last_s = tuple(processes.group_usage_s(self._groups[slot]) for slot in range(SLOTS))
        except FileNotFoundError:
            # The run has just ended and removed its groups: what was read a moment ago, when it was last checked.
            if not self._last_s:
                raise
        return self._last_s

    def role_usage_s(self) -> dict[str, float]:
        """Engines of both roles share a group; the run's own report says what each role was busy with."""
        return {}

    def describe(self) -> str:
        return "control groups of the run itself"

    def close(self) -> None:
        return None
