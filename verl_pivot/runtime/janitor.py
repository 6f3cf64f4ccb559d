"""Cleans up after a run whose processes were killed: shared memory and CPU groups outlive every process.

A run that ends by itself leaves nothing. But when the driver is interrupted or killed, Ray ends the trainer and the
control plane with SIGKILL, and neither gets to remove anything. So the trainer starts this small process beside
them. It belongs to no other process's tree, session or process group, sleeps until the lock that the owner of the
parameter store holds is released, however that comes about, and removes what is left by then.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from verl_pivot.runtime import cpu_share
from verl_pivot.store.layout import RunLayout
from verl_pivot.store.owner import remove_run

GROUPS_DEADLINE_S = 120.0
"""How long the processes of a killed run may take to leave its CPU groups."""
_LOOK_S = 0.1


def start(run_dir: Path) -> None:
    """Start the janitor of a run; returns when it is on its own. Called by the process that owns the run folder."""
    command = [sys.executable, "-m", __name__, str(run_dir)]
    null = subprocess.DEVNULL
    subprocess.run(command, stdin=null, stdout=null, stderr=null, start_new_session=True, check=True)


def main(run_dir: str) -> None:
    if os.fork():
        os._exit(0)  # the parent returns from start(); nobody is left who would wait for the child
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    layout = RunLayout(Path(run_dir))
    _wait_for_end(layout)
    remove_run(layout)
    _remove_groups(layout.run_dir.name)


def _wait_for_end(layout: RunLayout) -> None:
    """Returns when the run folder has no owner. A shared lock, so that it is nobody's again when this process ends."""
    with suppress(FileNotFoundError):
        fd = os.open(layout.owner, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)


def _remove_groups(run_id: str) -> None:
    end_s = time.monotonic() + GROUPS_DEADLINE_S
    while cpu_share.groups_of(run_id) and time.monotonic() < end_s:
        cpu_share.sweep_dead()
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
