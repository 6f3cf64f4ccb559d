"""What a run leaves on the machine while it lives, and must not leave behind: processes and CPU groups. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.05


def eventually(look: Callable[[], T], deadline_s: float) -> T:
    """The first true result of ``look``, or its last one when ``deadline_s`` have passed."""
    end_s = time.monotonic() + deadline_s
    while not (result := look()) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return result


def of_session(session: int) -> dict[int, str]:
    """Living processes (no zombies) of a session with their command lines. Everything a run starts is in its driver's
    session, whoever its parent has become, unless it left it on purpose."""
    found = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None and fields[0] not in "ZX" and int(fields[3]) == session:
            found[pid] = command_line(pid)
    return found


def naming(text: str) -> dict[int, str]:
    """Living processes, those of this test's own excepted, that have ``text`` in their command line."""
    own = os.getsid(0)
    found = {pid: line for pid in _pids() if text in (line := command_line(pid))}
    return {pid: line for pid, line in found.items() if (fields := _stat(pid)) and int(fields[3]) != own}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def kill_all(find: Callable[[], dict[int, str]], deadline_s: float = 20.0) -> None:
    """SIGKILL until ``find`` finds nothing: what is killed may have just started something."""

    def none_left() -> bool:
        found = find()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    eventually(none_left, deadline_s)


def cpu_groups(run_id: str) -> list[Path]:
    """Control groups of a run, in whatever hierarchy."""
    root = Path("/sys/fs/cgroup")
    return [group for base in root.glob("**/verl_pivot") for group in base.glob(f"{run_id}*")]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name: state, parent, process group, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
