"""The processes of one run: which they are, which of them compute, and how much CPU they have used.

A run's processes are known by an environment variable that all of them inherit; nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.deployments.announce import FOLDER, RUN_DIRECTORY

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MINE, _LOOKS = -1, 5
_ENGINE = "VLLM::EngineCore"


@dataclass(frozen=True)
class ComputeProcess:
    """A process that computes on one virtual GPU."""

    pid: int
    role: str
    """``train``, ``rollout`` or ``genrm``."""
    gpu: str


class RunProcesses:
    """Looks at the processes of the run whose directory is ``run``. Call ``refresh`` before asking."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._mark = f"{RUN_DIRECTORY}={run}".encode()
        self._seen: dict[tuple[int, str], int] = {}
        self.pids: list[int] = []

    def refresh(self) -> list[int]:
        """Find the run's living processes."""
        found: list[int] = []
        seen: dict[tuple[int, str], int] = {}
        for entry in os.listdir(_PROC):
            if not entry.isdigit():
                continue
            pid = int(entry)
            start = _start_ticks(pid)
            if start is None:
                continue
            looks = self._seen.get((pid, start), 0)
            # Between fork and exec a process may show another environment: look more than once.
            if 0 <= looks < _LOOKS:
                looks = _MINE if self._mark in _environ(pid) else looks + 1
            seen[pid, start] = looks
            if looks == _MINE:
                found.append(pid)
        self._seen, self.pids = seen, found
        return found

    def compute(self) -> list[ComputeProcess]:
        """Training workers and inference engines of verl's own deployments, as far as they have started."""
        announced = self._announced()
        found = []
        for pid in self.pids:
            command = _command(pid)
            if command.startswith("ray::WorkerDict") and announced.get(pid):
                found.append(ComputeProcess(pid, "train", announced[pid]))
            elif command.startswith(_ENGINE) and not _command(_parent(pid)).startswith(_ENGINE):
                # An engine's child is a helper of a moment, and in the engine's slot by itself. Only servers of the
                # policy import what announces: its model configuration names it.
                role = "rollout" if _parent(pid) in announced else "genrm"
                found.append(ComputeProcess(pid, role, _variable(pid, b"CUDA_VISIBLE_DEVICES")))
        return found

    def _announced(self) -> dict[int, str]:
        folder = self._run / FOLDER
        if not folder.is_dir():
            return {}
        return {int(path.name): path.read_text() for path in folder.iterdir()}

    def groups(self) -> dict[int, Path]:
        """Slot -> CPU accounting group, for processes that somebody else (resource_shift) placed in slot groups."""
        groups = {}
        for pid in self.pids:
            group = _accounting_group(pid)
            if group is not None and group.name.startswith("slot"):
                groups[int(group.name.removeprefix("slot"))] = group
        return groups

    def kill(self, patience_s: float = 5.0) -> int:
        """End all processes of the run, and wait until they are gone. Returns how many there were."""
        count = len(self.refresh())
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.refresh():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            deadline_s = time.monotonic() + patience_s
            while self.refresh() and time.monotonic() < deadline_s:
                time.sleep(0.1)
        return count

    def memory_bytes(self) -> int:
        """Proportional set size of all processes together."""
        return sum(_pss_bytes(pid) for pid in self.pids)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time used so far by ``pids``, all threads."""
    total = 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def machine_usage_s() -> float:
    """CPU seconds that all cores together have not been idle."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def group_usage_s(group: Path) -> float:
    """CPU seconds that a control group has used since it was made (v1 ``cpuacct``, or v2)."""
    counter = group / "cpuacct.usage"
    if counter.exists():
        return int(counter.read_text()) / 1e9
    return int(dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())["usage_usec"]) / 1e6


def group_pids(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def gpu_to_slot(gpus: Collection[str], n_slots: int) -> dict[str, int]:
    """Slots in the order of the virtual GPUs' numbers. Raises ValueError unless there are exactly ``n_slots`` single
    ones."""
    distinct = sorted(set(gpus), key=lambda gpu: (len(gpu), gpu))
    if len(distinct) != n_slots or not all(gpu.isdigit() for gpu in distinct):
        raise ValueError(f"compute processes name the virtual GPUs {distinct}; {n_slots} single ones were expected")
    return {gpu: slot for slot, gpu in enumerate(distinct)}


def _accounting_group(pid: int) -> Path | None:
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpuacct" in controllers.split(","):
            return _CGROUP / "cpuacct" / path.lstrip("/")
    for line in lines:
        if line.startswith("0::"):
            return _CGROUP / line[3:].lstrip("/")
    return None


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat after the name: state, parent, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _start_ticks(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return -1 if fields is None else int(fields[1])


def _environ(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _variable(pid: int, name: bytes) -> str:
    values = [item.partition(b"=")[2].decode() for item in _environ(pid) if item.startswith(name + b"=")]
    return values[-1] if values else ""


def _command(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _pss_bytes(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
