"""What a slot is on the CPU platform: a fixed share of the processor that all its processes have together.

Enforced by a cgroup with a CPU quota (v1, or v2 where the cpu controller is delegated to us); where neither is
permitted, by pinning each slot to one core, which bounds a slot by a whole core and lets slots share cores. Slots also
yield to what is outside them: the front ends, routers and the control plane, without which no engine gets work, would
otherwise wait seconds for a core when slots together fill the machine. Used by the control plane, which places the
processes of engines and trainer; needs no other process.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from verl_pivot.config.schema import MIN_CPU_SHARE

PERIOD_US = 20_000
"""Quota period. The kernel's default of 100 ms lets a slot run and starve in bursts that decoding notices."""
FOLDER = "verl_pivot"
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class _Enforcer(Protocol):
    """One way to bound slots; all raise OSError where the system refuses."""

    def add_slot(self, slot_id: int) -> None: ...
    def place(self, slot_id: int, pid: int) -> None: ...
    def usage_s(self, slot_id: int) -> float | None: ...
    def remove(self) -> None: ...
    def describe(self) -> str: ...


class CpuShares:
    """CPU shares of one run's slots, ids 0 to ``n_slots - 1``. Use ``create``."""

    def __init__(self, enforcer: _Enforcer, n_slots: int) -> None:
        self._enforcer = enforcer
        self.n_slots = n_slots

    @classmethod
    def create(cls, run_id: str, n_slots: int, share: float) -> CpuShares:
        """``share`` is in cores. Removes what dead runs left. Raises ValueError for a share that cannot be."""
        if not MIN_CPU_SHARE <= share <= (os.cpu_count() or 1):
            raise ValueError(
                f"trainer.resource_shift.slots.cpu_share is {share}: it must be from {MIN_CPU_SHARE} to "
                f"{os.cpu_count()} cores"
            )
        sweep_dead()
        refusals = []
        for kind in (_CgroupV1, _CgroupV2):
            group: _Cgroup | None = None
            try:
                group = kind(_run_folder(run_id), share)
                for slot_id in range(n_slots):
                    group.add_slot(slot_id)
                return cls(group, n_slots)
            except OSError as refusal:  # not permitted here; the next way may be
                refusals.append(f"{kind.name}: {refusal}")
                if group is not None:
                    group.remove()
        return cls(_Pinned("; ".join(refusals)), n_slots)

    def place(self, slot_id: int, pid: int) -> None:
        """Put a process with all its threads, and whatever it starts later, into the slot's share."""
        self._check(slot_id)
        self._enforcer.place(slot_id, pid)

    def usage_s(self, slot_id: int) -> float | None:
        """CPU seconds that the slot's processes used since ``create``; None where nobody counts them."""
        self._check(slot_id)
        return self._enforcer.usage_s(slot_id)

    def describe(self) -> str:
        """What is enforced, and why it is not more."""
        return self._enforcer.describe()

    def close(self) -> None:
        """Lift the bounds: surviving processes go back to where this process was, and the groups go. Idempotent."""
        self._enforcer.remove()

    def _check(self, slot_id: int) -> None:
        if not 0 <= slot_id < self.n_slots:
            raise ValueError(f"there is no slot {slot_id}: slots are 0 to {self.n_slots - 1}")


def sweep_dead() -> list[str]:
    """Remove empty groups whose run's process is gone; returns their names. Groups that still have processes stay."""
    removed = []
    for base in {*_CgroupV1.bases(), *_CgroupV2.bases()}:
        for folder in _folders(base / FOLDER):
            if not _owner_is_alive(folder.name) and _remove_run(folder):
                removed.append(folder.name)
    return sorted(set(removed))


def groups_of(run_id: str) -> list[Path]:
    """Folders of a run's groups that exist."""
    prefix = _folder_prefix(run_id)
    bases = {*_CgroupV1.bases(), *_CgroupV2.bases()}
    return [folder for base in bases for folder in _folders(base / FOLDER) if folder.name.startswith(prefix)]


class _Cgroup:
    """A folder for the run with one group a slot, in every hierarchy that takes part."""

    name: str

    def __init__(self, base: Path, home: Path, run_folder: str, share: float) -> None:
        self._home = home
        self._run = base / FOLDER / run_folder
        self._share = share
        self._quota_us = round(share * PERIOD_US)
        self._n_slots = 0

    def add_slot(self, slot_id: int) -> None:
        group = self._run / f"slot{slot_id}"
        group.mkdir(parents=True, exist_ok=True)
        self._yield(self._run.parent)
        self._limit(group)
        self._n_slots += 1

    def _yield(self, all_slots: Path) -> None:
        """Give the folder of all runs' slots little weight against processes outside it: enough to go on beside a
        busy stranger, little enough that front ends (Ray runs them at nice 15) do not wait for slots."""
        raise NotImplementedError

    def _limit(self, group: Path) -> None:
        raise NotImplementedError

    def place(self, slot_id: int, pid: int) -> None:
        (self._run / f"slot{slot_id}" / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        _empty_into(self._run, self._home)
        _remove_run(self._run)

    def describe(self) -> str:
        return f"{self.name} quota: {self._share:g} core for each of {self._n_slots} slots"


class _CgroupV1(_Cgroup):
    """The ``cpu`` hierarchy limits; ``cpuacct`` counts, in the same folder or in a hierarchy of its own."""

    name = "cgroup v1"

    def __init__(self, run_folder: str, share: float) -> None:
        base = _v1_home("cpu")
        if base is None:
            raise FileNotFoundError("no cpu hierarchy is mounted")
        super().__init__(base, base, run_folder, share)
        account = _v1_home("cpuacct")
        same = account is not None and account.resolve() == base.resolve()
        self._account_home = None if same else account
        self._account_run = self._run if account is None or same else account / FOLDER / run_folder

    @staticmethod
    def bases() -> list[Path]:
        return [home for home in map(_v1_home, ("cpu", "cpuacct")) if home is not None]

    def add_slot(self, slot_id: int) -> None:
        super().add_slot(slot_id)
        (self._account_run / f"slot{slot_id}").mkdir(parents=True, exist_ok=True)

    def _yield(self, all_slots: Path) -> None:
        (all_slots / "cpu.shares").write_text("64")

    def _limit(self, group: Path) -> None:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(self._quota_us))

    def place(self, slot_id: int, pid: int) -> None:
        super().place(slot_id, pid)
        if self._account_home is not None:
            (self._account_run / f"slot{slot_id}" / "cgroup.procs").write_text(str(pid))

    def usage_s(self, slot_id: int) -> float | None:
        counter = self._account_run / f"slot{slot_id}" / "cpuacct.usage"
        return int(counter.read_text()) / 1e9 if counter.exists() else None

    def remove(self) -> None:
        super().remove()
        if self._account_home is not None:
            _empty_into(self._account_run, self._account_home)
            _remove_run(self._account_run)


class _CgroupV2(_Cgroup):
    """The unified hierarchy; needs an ancestor group that is ours to write and may enable the cpu controller."""

    name = "cgroup v2"

    def __init__(self, run_folder: str, share: float) -> None:
        bases = self.bases()
        if not bases:
            raise FileNotFoundError("no unified hierarchy with a cpu controller is mounted")
        refusal: OSError | None = None
        for base in bases:
            try:
                (base / "cgroup.subtree_control").write_text("+cpu")
                run = base / FOLDER / run_folder
                run.mkdir(parents=True, exist_ok=True)
                for folder in (base / FOLDER, run):
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            except OSError as error:  # this ancestor is not ours, or holds processes of its own
                refusal = error
            else:
                home = _v2_home()
                assert home is not None
                return super().__init__(base, home, run_folder, share)
        assert refusal is not None
        raise refusal

    @staticmethod
    def bases() -> list[Path]:
        """This process's group and its ancestors, nearest first, as far as they have the cpu controller."""
        home = _v2_home()
        if home is None:
            return []
        chain = [home, *(p for p in home.parents if p == _CGROUP_ROOT or _CGROUP_ROOT in p.parents)]
        return [p for p in chain if "cpu" in (p / "cgroup.controllers").read_text().split()]

    def _yield(self, all_slots: Path) -> None:
        (all_slots / "cpu.weight").write_text("6")

    def _limit(self, group: Path) -> None:
        (group / "cpu.max").write_text(f"{self._quota_us} {PERIOD_US}")

    def usage_s(self, slot_id: int) -> float | None:
        stat = self._run / f"slot{slot_id}" / "cpu.stat"
        if not stat.exists():
            return None
        return int(dict(line.split() for line in stat.read_text().splitlines())["usage_usec"]) / 1e6


class _Pinned:
    """Each slot on one core, round robin over the cores this process may use."""

    def __init__(self, why: str) -> None:
        self._why = why
        self._cores = sorted(os.sched_getaffinity(0))

    def add_slot(self, slot_id: int) -> None:
        pass

    def place(self, slot_id: int, pid: int) -> None:
        core = self._cores[slot_id % len(self._cores)]
        pinned: set[str] = set()
        while threads := set(os.listdir(f"/proc/{pid}/task")) - pinned:
            for thread in threads:
                try:
                    os.sched_setaffinity(int(thread), {core})
                    os.setpriority(os.PRIO_PROCESS, int(thread), 19)
                except ProcessLookupError:  # the thread ended meanwhile
                    continue
            pinned |= threads

    def usage_s(self, slot_id: int) -> float | None:
        return None

    def remove(self) -> None:
        pass

    def describe(self) -> str:
        return f"each slot pinned to one of the cores {self._cores}, without a quota ({self._why})"


def _own_cgroups() -> dict[str, str]:
    """Path of this process in each hierarchy, by controller; the unified one under the empty name."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _v1_home(controller: str) -> Path | None:
    """This process's group in the v1 hierarchy of ``controller``; the mount's root where a container hides it."""
    path, mount = _own_cgroups().get(controller), _CGROUP_ROOT / controller
    if path is None or not mount.is_dir():
        return None
    home = mount / path.lstrip("/")
    return home if home.is_dir() else mount


def _v2_home() -> Path | None:
    """This process's group in the unified hierarchy, when that is what is mounted at the usual place."""
    path = _own_cgroups().get("")
    if path is None or not (_CGROUP_ROOT / "cgroup.controllers").exists():
        return None
    home = _CGROUP_ROOT / path.lstrip("/")
    return home if home.is_dir() else _CGROUP_ROOT


def _run_folder(run_id: str) -> str:
    pid = os.getpid()
    return f"{_folder_prefix(run_id)}{pid}.{_start_ticks(pid)}"


def _folder_prefix(run_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", run_id) + "."


def _owner_is_alive(run_folder: str) -> bool:
    """Process id and start time are in the folder's name: a process id alone may have been given away again."""
    match = re.fullmatch(r".+\.(\d+)\.(\d+)", run_folder)
    return match is None or _start_ticks(int(match[1])) == int(match[2])


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _folders(parent: Path) -> list[Path]:
    return [entry for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []


def _empty_into(run: Path, home: Path) -> None:
    for group in _folders(run):
        for pid in (group / "cgroup.procs").read_text().split():
            try:
                (home / "cgroup.procs").write_text(pid)
            except ProcessLookupError:  # it ended meanwhile
                continue


def _remove_run(run: Path) -> bool:
    """Remove a run's groups, then the common folder when this was the last run in it. False when processes keep one,
    or there is none."""
    removed = all([_rmdir(group) for group in _folders(run)]) and _rmdir(run)
    _rmdir(run.parent)
    return removed


def _rmdir(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # processes or other groups are in it, or it is gone
        return False
    return True
