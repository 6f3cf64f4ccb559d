from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.deployments.announce import RUN_DIRECTORY
from benchmarks.deployments.processes import RunProcesses, cpu_seconds, group_usage_s


def start(run: Path, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, RUN_DIRECTORY: str(run)}, start_new_session=True
    )


def wait_until(found: RunProcesses, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(found.refresh()) != count:
        assert time.monotonic() < deadline, f"{len(found.pids)} processes instead of {count}"
        time.sleep(0.05)


def test_kill_ends_the_run_with_its_descendants_and_nobody_else(tmp_path: Path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {deaf!r}]); time.sleep(60)"
    mine, other = start(tmp_path / "mine", parent), start(tmp_path / "other", "import time; time.sleep(60)")
    try:
        found = RunProcesses(tmp_path / "mine")
        wait_until(found, 2)
        assert found.kill(patience_s=1.0) == 2
        assert found.refresh() == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        mine.wait()


def test_cpu_time_of_living_processes_is_added_up():
    before = cpu_seconds([os.getpid()])
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert 0.15 < cpu_seconds([os.getpid(), 2**22 + 1]) - before < 1.0


def test_usage_is_read_from_either_kind_of_group(tmp_path: Path):
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert group_usage_s(tmp_path) == 2.5
    (tmp_path / "cpuacct.usage").write_text("1500000000\n")
    assert group_usage_s(tmp_path) == 1.5
