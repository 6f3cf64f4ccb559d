"""The janitor outlives the run it cleans up after, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_pivot.runtime import cpu_share

OWNER = """
import sys
from verl_pivot.config.schema import StoreConfig
from verl_pivot.runtime import cpu_share, janitor
from verl_pivot.store import ParameterStore

store = ParameterStore.create(StoreConfig(directory=sys.argv[1]))
shares = cpu_share.CpuShares.create(store.run_id, 2, 0.5)
janitor.start(store.run_dir)
print(store.run_id, flush=True)
sys.stdin.readline()
shares.close()
store.close()
"""


def _eventually(look: Callable[[], bool], deadline_s: float = 20.0) -> bool:
    end_s = time.monotonic() + deadline_s
    while not look() and time.monotonic() < end_s:
        time.sleep(0.02)
    return look()


def _janitors(run_id: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if run_id.encode() in line:
            found.append(int(name))
    return found


@pytest.mark.parametrize("end", ["killed", "session killed", "closed"])
def test_nothing_stays(end: str, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdin is not None and owner.stdout is not None
    run_id = owner.stdout.readline().strip()
    (janitor,) = _janitors(run_id)
    assert os.getsid(janitor) != owner.pid and os.getpgid(janitor) != owner.pid
    assert (tmp_path / "store" / run_id).is_dir()
    if end == "killed":
        owner.kill()
    elif end == "session killed":
        os.killpg(owner.pid, signal.SIGKILL)
    else:
        owner.stdin.write("\n")
        owner.stdin.flush()
    owner.communicate(timeout=20)
    assert _eventually(lambda: not _janitors(run_id))
    assert not list((tmp_path / "store").iterdir())
    assert not cpu_share.groups_of(run_id)


def test_it_ends_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl_pivot.runtime.janitor", str(tmp_path / "run-20260101T000000-1-00000000")]
    subprocess.run(command, check=True, timeout=20)
    assert _eventually(lambda: not _janitors("run-20260101T000000-1-00000000"))
