"""What a forked process has from whom. Light servers: nothing of vLLM is imported here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_targets
import pytest

from verl_pivot.vllm_ext import forkserver


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Put a server with the given preloads in place of the one for engines; returns it."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")

    def start(*preload: str) -> Any:
        new = forkserver._EngineForkServer(preload)
        monkeypatch.setattr(forkserver, "_server", new)
        return new

    return start


def _report() -> dict[str, Any]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = forkserver._EngineProcess(target=forked_targets.report, args=(theirs,))
    process.start()
    assert ours.poll(30), f"no report; exit code {process.exitcode}"
    found = ours.recv()
    process.join()
    assert process.exitcode == 0
    return found


def _gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True


def test_a_child_has_the_surroundings_of_its_parent(
    server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIVOT_TEST_OLD", "1")
    server("forked_targets")
    first = _report()
    assert first["environ"] == dict(os.environ)

    monkeypatch.delenv("PIVOT_TEST_OLD")
    monkeypatch.setenv("PIVOT_TEST_NEW", "2")
    monkeypatch.chdir(tmp_path)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        second = _report()
    finally:
        os.sched_setaffinity(0, cores)
    assert second["environ"] == dict(os.environ)
    assert (first["affinity"], second["affinity"]) == (cores, {min(cores)})
    assert second["cwd"] == str(tmp_path)


def test_children_share_no_random_state(server: Callable[..., Any]) -> None:
    server("forked_targets")
    (python1, numpy1), (python2, numpy2) = (_report()["random"] for _ in range(2))
    assert python1 != python2 and numpy1 != numpy2


def test_the_main_script_is_not_imported_again(tmp_path: Path) -> None:
    """It may be anything: a test runner, or the worker of a cluster framework."""
    script = tmp_path / "front_end.py"
    script.write_text(
        "print('main is', __name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    from verl_pivot.vllm_ext import forkserver\n"
        "    forkserver._server = forkserver._EngineForkServer(())\n"
        "    process = forkserver._EngineProcess(target=print, args=('child ran',))\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[:2] == ["main is __main__", "child ran"]


def test_a_killed_child_is_noticed(server: Callable[..., Any]) -> None:
    server("forked_targets")
    process = forkserver._EngineProcess(target=forked_targets.wait_for_ever, daemon=True)
    process.start()
    os.kill(process.pid, signal.SIGKILL)
    assert multiprocessing.connection.wait([process.sentinel], timeout=5)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("entered", [True, False])
def test_children_die_with_the_server(server: Callable[..., Any], entered: bool) -> None:
    running = server()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = forkserver._EngineProcess(target=forked_targets.wait_for_ever, args=(theirs,), daemon=True)
    process.start()
    if entered:
        assert ours.poll(30)
    os.kill(running._forkserver_pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while not _gone(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert _gone(process.pid)
    assert process.exitcode is not None
    assert _report()["environ"], "the next engine gets a new server"


def test_a_killed_parent_leaves_no_orphans() -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    front_end = spawn.Process(target=forked_targets.front_end, args=(theirs,))
    front_end.start()
    assert ours.poll(30)
    pids = ours.recv()
    assert not any(_gone(pid) for pid in pids)
    os.kill(front_end.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while not all(_gone(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [pid for pid in pids if not _gone(pid)] == []


def test_refuses_to_fork_a_server_with_threads(server: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    server("starts_a_thread")
    process = forkserver._EngineProcess(target=forked_targets.wait_for_ever, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 1
    assert "had other threads after preloading" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({"A": "1"}, {"A": "2"}, []),
        ({}, {"OMP_NUM_THREADS": "2"}, []),
        ({}, {"LD_PRELOAD": "x.so"}, ["LD_PRELOAD"]),
        ({"OMP_PROC_BIND": "true"}, {}, ["OMP_PROC_BIND"]),
        ({"PYTHONHASHSEED": "1", "MKL_CBWR": "A"}, {"PYTHONHASHSEED": "1", "MKL_CBWR": "B"}, ["MKL_CBWR"]),
    ],
)
def test_variables_that_libraries_read_once(before: dict[str, str], now: dict[str, str], changed: list[str]) -> None:
    assert forkserver.fixed_variables_changed(before, now) == changed


def test_says_which_variable_came_too_late(server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server("forked_targets")
    _report()
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    with pytest.raises(forkserver.ForkServerError, match="OMP_PROC_BIND changed"):
        forkserver._EngineProcess(target=forked_targets.wait_for_ever, daemon=True).start()


def test_preloads_are_settled_when_the_server_runs(server: Callable[..., Any]) -> None:
    running = server()
    running.add_preload(("forked_targets",))
    _report()
    running.add_preload(("forked_targets",))
    with pytest.raises(forkserver.ForkServerError, match="cannot preload json"):
        running.add_preload(("json",))
