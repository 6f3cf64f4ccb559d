"""CPU shares of slots, with real processes: what is promised is what the kernel allows here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_pivot.runtime import cpu_share
from verl_pivot.runtime.cpu_share import CpuShares, sweep_dead

BUSY = """
import hashlib, threading
block = bytes(1 << 22)  # hashing releases the interpreter lock: two threads want two cores
def work():
    while True:
        hashlib.sha256(block).digest()
for _ in range(2):
    threading.Thread(target=work).start()
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    while len(os.listdir(f"/proc/{process.pid}/task")) < 3:
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def shares() -> Iterator[CpuShares]:
    shares = CpuShares.create("test run", 2, 0.5)
    yield shares
    shares.close()


def require_quota(shares: CpuShares) -> None:
    if not shares.describe().startswith("cgroup"):
        pytest.skip(f"no CPU quota is permitted here: {shares.describe()}")


def test_a_busy_process_gets_its_share_and_no_more(shares: CpuShares, busy: subprocess.Popen[bytes]) -> None:
    require_quota(shares)
    shares.place(1, busy.pid)
    time.sleep(0.1)
    started_s, before_s = time.monotonic(), shares.usage_s(1)
    used_s = cpu_s(busy.pid)
    time.sleep(2.0)
    used_s = cpu_s(busy.pid) - used_s
    after_s = shares.usage_s(1)
    wall_s = time.monotonic() - started_s
    assert before_s is not None and after_s is not None
    assert 0.01 * wall_s < used_s <= 0.55 * wall_s
    assert used_s - 0.05 <= after_s - before_s <= 0.55 * wall_s, (
        "the slot's count is of a longer time than the process's"
    )
    idle_s = shares.usage_s(0)
    assert idle_s is not None and idle_s < 0.05
    assert "0.5 core for each of 2 slots" in shares.describe()


def require_no_other_run(name: str) -> None:
    """All runs' slots together yield to what is outside, so beside another run these get less."""
    folders = [base / cpu_share.FOLDER for base in {*cpu_share._CgroupV1.bases(), *cpu_share._CgroupV2.bases()}]
    others = [g.name for folder in folders for g in folder.glob("*.*/slot0") if not g.parent.name.startswith(name)]
    if others:
        pytest.skip("slots of another run are on this machine")


def part_of(one: subprocess.Popen[bytes], crowd: list[subprocess.Popen[bytes]]) -> float:
    """Its part of the CPU time that all of them get; a ratio, so that what else the machine does counts for little."""
    time.sleep(0.5)
    one_s, crowd_s = cpu_s(one.pid), sum(cpu_s(process.pid) for process in crowd)
    for _ in range(40):
        time.sleep(0.5)
        got_s = cpu_s(one.pid) - one_s
        all_s = got_s + sum(cpu_s(process.pid) for process in crowd) - crowd_s
        if all_s > 1.5:
            return got_s / all_s
    pytest.skip("the machine is too busy with other work to measure this")


def test_slots_yield_to_what_is_outside_them() -> None:
    """A process beside slots that fill its core gets much of it, at the priority that Ray gives front ends; and slots
    go on beside a stranger of normal priority."""
    shares = CpuShares.create("yield", 2, 0.5)
    require_quota(shares)
    require_no_other_run("yield")
    core = {min(os.sched_getaffinity(0))}
    spin = "while True: pass"
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {core}); os.nice(15)\n{spin}"]
    crowd = [subprocess.Popen(command) for _ in range(4)]
    outside = subprocess.Popen(command)
    stranger = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {core})\n{spin}"]
    try:
        for number, process in enumerate(crowd):
            shares.place(number % 2, process.pid)
        assert part_of(outside, crowd) > 0.15
        outside.kill()
        outside.wait()
        outside = subprocess.Popen(stranger)
        assert part_of(outside, crowd) < 0.98
    finally:
        for process in (*crowd, outside):
            process.kill()
            process.wait()
        shares.close()


def test_close_lifts_the_bound_and_leaves_nothing(busy: subprocess.Popen[bytes]) -> None:
    shares = CpuShares.create("closing", 1, 0.1)
    require_quota(shares)
    where = Path(f"/proc/{busy.pid}/cgroup")
    before = where.read_text()
    shares.place(0, busy.pid)
    placed = where.read_text()
    assert "closing" in placed
    folders = [base / cpu_share.FOLDER for base in {*cpu_share._CgroupV1.bases(), *cpu_share._CgroupV2.bases()}]
    assert any(list(folder.glob("closing.*/slot0")) for folder in folders)
    shares.close()
    shares.close()
    assert where.read_text() == before
    assert not any(list(folder.glob("closing.*")) for folder in folders)
    assert shares.usage_s(0) is None


def test_what_a_dead_run_left_is_swept_and_what_lives_is_not(shares: CpuShares) -> None:
    require_quota(shares)
    code = "from verl_pivot.runtime.cpu_share import CpuShares; CpuShares.create('gone', 2, 0.5)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [name for name in sweep_dead() if name.startswith("gone.")]
    assert not [name for name in sweep_dead() if name.startswith("gone.")]
    assert shares.usage_s(0) is not None


def refuse(*_: object) -> None:
    raise PermissionError(13, "Permission denied", "cpu.max")


def test_without_permission_each_slot_is_pinned_to_a_core(
    monkeypatch: pytest.MonkeyPatch, busy: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(cpu_share._CgroupV1, "_limit", refuse)
    monkeypatch.setattr(cpu_share._CgroupV2, "_limit", refuse)
    shares = CpuShares.create("pinned", 5, 0.5)
    cores = sorted(os.sched_getaffinity(0))
    shares.place(3, busy.pid)
    for thread in os.listdir(f"/proc/{busy.pid}/task"):
        assert os.sched_getaffinity(int(thread)) == {cores[3 % len(cores)]}
    assert shares.usage_s(3) is None
    assert "without a quota" in shares.describe()
    assert "cgroup v" in shares.describe()
    shares.close()
    bases = {*cpu_share._CgroupV1.bases(), *cpu_share._CgroupV2.bases()}
    assert not [p for base in bases for p in (base / cpu_share.FOLDER).glob("pinned.*")], "a refused try leaves nothing"


def test_what_cannot_be_is_refused() -> None:
    for share in (0.0, -1.0, 0.01, 1e6):
        with pytest.raises(ValueError, match=r"slots\.cpu_share is"):
            CpuShares.create("bad", 1, share)
    shares = CpuShares.create("two", 2, 0.5)
    try:
        with pytest.raises(ValueError, match="no slot 2: slots are 0 to 1"):
            shares.place(2, os.getpid())
        with pytest.raises(ProcessLookupError):
            shares.place(0, 2**22 + 1)
    finally:
        shares.close()


class FakeV2:
    """A unified hierarchy in a folder: shows which files are written; the kernel's part is not there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = root / "user.slice"
        for folder in (root, self.home):
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.controllers").write_text("cpuset cpu memory\n")
            (folder / "cgroup.subtree_control").write_text("")
            (folder / "cgroup.procs").write_text("")
        monkeypatch.setattr(cpu_share, "_CGROUP_ROOT", root)
        monkeypatch.setattr(cpu_share, "_own_cgroups", lambda: {"": "/user.slice"})


def test_the_unified_hierarchy_is_written_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v2 = FakeV2(tmp_path, monkeypatch)
    shares = CpuShares.create("v2", 2, 0.25)
    (run,) = (v2.home / cpu_share.FOLDER).glob("v2.*")
    assert (v2.home / "cgroup.subtree_control").read_text() == "+cpu"
    assert (run / "cgroup.subtree_control").read_text() == "+cpu"
    assert (run / "slot1" / "cpu.max").read_text() == "5000 20000"
    shares.place(1, 4711)
    assert (run / "slot1" / "cgroup.procs").read_text() == "4711"
    (run / "slot1" / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert shares.usage_s(1) == 1.5
    assert shares.describe() == "cgroup v2 quota: 0.25 core for each of 2 slots"


def test_an_ancestor_is_used_when_the_own_group_holds_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2 = FakeV2(tmp_path, monkeypatch)
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        if path == v2.home / "cgroup.subtree_control":
            raise OSError(16, "Device or resource busy")
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    CpuShares.create("v2", 1, 0.25)
    assert (tmp_path / cpu_share.FOLDER).is_dir()
    assert not (v2.home / cpu_share.FOLDER).exists()
