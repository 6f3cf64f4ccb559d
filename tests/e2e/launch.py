"""Starts whole training runs as a user would, watches them by what they write, and takes every trace of them away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e import processes
from e2e.toy_task import Overrides

Event = dict[str, Any]

SWITCH = ("+resource_shift@_global_=pivot", "+pivot_platform@_global_=cpu")
START_S = 600.0
"""Time for a run to reach its first step on a busy machine."""
STEP_S = 240.0
GONE_S = 30.0
"""Time for everything of a run to be gone after its end."""
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own: when their raylet is killed they take a minute to notice, and hold nothing of the run."""


class Run:
    """One ``python -m verl.trainer.main_ppo`` with everything it starts.

    Args:
        folder: empty directory for logs and outputs.
        overrides: hydra overrides by option; those the run cannot do without are added.
        name: ``trainer.experiment_name``.
        switch: overrides that come first.
        environ: further environment variables.
        store: directory for the parameter store; None makes one in shared memory and removes it with the run.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Overrides,
        name: str = "run",
        switch: tuple[str, ...] = SWITCH,
        environ: dict[str, str] | None = None,
        store: Path | None = None,
    ) -> None:
        self.folder, self.name = folder, name
        self.ledger_path = folder / f"{name}-ledger.jsonl"
        self.store = store or Path(tempfile.mkdtemp(prefix="pivot-e2e-", dir="/dev/shm"))
        self.ray_dir = Path(tempfile.mkdtemp(prefix="pe", dir="/tmp"))  # sockets below it must have short paths
        self.observed = folder / "observe" / name
        own = {
            "trainer.experiment_name": name,
            "trainer.project_name": "e2e",
            "trainer.default_local_dir": folder / "checkpoints",
            "trainer.rollout_data_dir": folder / "rollouts" / name,
            "hydra.run.dir": folder / "hydra" / name,
            "+ray_kwargs.ray_init._temp_dir": self.ray_dir,
        }
        if any("resource_shift" in override for override in switch):
            own["trainer.resource_shift.observe.directory"] = self.observed.parent
            own["trainer.resource_shift.store.directory"] = self.store
            own["+reward.custom_reward_function.reward_kwargs.ledger"] = self.ledger_path
        options = [f"{key}={_value(value)}" for key, value in {**own, **overrides}.items() if value is not None]
        environment = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_ROOT": str(folder), **(environ or {})}
        for unwanted in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "PYTEST_CURRENT_TEST"):
            environment.pop(unwanted, None)
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "verl.trainer.main_ppo", *switch, *options],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_s = time.monotonic()

    # ---- looking ------------------------------------------------------------------------------------------------

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, kind: str | None = None) -> list[Event]:
        """Events so far, of the control plane and of the trainer; a line being written is left out."""
        found = [event for path in self.observed.glob("*.jsonl") for event in _json_lines(path)]
        return sorted((e for e in found if kind is None or e["kind"] == kind), key=lambda e: e["t_s"])

    def report(self) -> dict[str, Any]:
        return json.loads((self.observed / "report.json").read_text())

    def ledger(self) -> list[dict[str, Any]]:
        """What the reward function noted."""
        return list(_json_lines(self.ledger_path)) if self.ledger_path.exists() else []

    def metrics(self) -> dict[int, dict[str, Any]]:
        """What verl logged, by step."""
        return {entry["step"]: entry["data"] for entry in _json_lines(self.folder / "e2e" / f"{self.name}.jsonl")}

    def trained(self) -> dict[int, list[dict[str, Any]]]:
        """What verl dumped about the responses of each step that it trained on."""
        return {int(path.stem): list(_json_lines(path)) for path in (self.folder / "rollouts" / self.name).glob("*")}

    def _find_run_id(self) -> str | None:
        starts = self.events("run_start")
        if starts:
            return str(starts[-1]["run_id"])
        folders = [path.name for path in self.store.glob("run-*")] if self.store.exists() else []
        return folders[0] if folders else None

    # ---- waiting ------------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], Any], what: str, deadline_s: float = STEP_S) -> Any:
        """The first true result of ``look``; fails when the run ends before, or after ``deadline_s``."""
        seen = processes.eventually(lambda: look() or self.process.poll() is not None, deadline_s)
        result = look()
        if not result:
            state = f"ended with {self.process.returncode}" if seen else f"took more than {deadline_s:g} s"
            pytest.fail(f"the run {state} before {what}\n{self.tail()}", pytrace=False)
        return result

    def wait_step(self, step: int, deadline_s: float = START_S) -> Event:
        """The event of ``step``, once it has ended."""
        return self.until(
            lambda: next((e for e in self.events("step") if e["step"] == step), None), f"step {step}", deadline_s
        )

    def wait_load(self, role: str, step: int = 0, among: Callable[[int], bool] = lambda slot: True) -> int:
        """A slot that serves ``role`` and runs sequences at this moment, ``step`` steps having ended."""
        self.wait_step(step) if step else self.until(lambda: self.events("run_start"), "its slots", START_S)
        seen = len(self.events("load"))

        def busy() -> tuple[int] | None:
            for event in self.events("load")[seen:]:
                for slot, load in event["slots"].items():
                    if load["role"] == role and load["status"] == "serving" and load["running"] and among(int(slot)):
                        return (int(slot),)
            return None

        return self.until(busy, f"a {role} engine ran sequences")[0]

    def wait_end(self, deadline_s: float = START_S) -> int:
        """Exit code of the driver."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {deadline_s:g} s\n{self.tail()}", pytrace=False)

    def finish(self, deadline_s: float = START_S) -> dict[str, Any]:
        """Wait for a good end; returns the report."""
        code = self.wait_end(deadline_s)
        assert code == 0, f"the run ended with {code}\n{self.tail()}"
        return self.report()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    # ---- acting -------------------------------------------------------------------------------------------------

    def engine_pids(self, slot: int, role: str) -> list[int]:
        """Processes that compute for the engine of ``role`` on ``slot``, newest start last."""
        placed = [e for e in self.events("engine") if e["slot"] == slot and e["role"] == role]
        return list(placed[-1]["pids"]) if placed else []

    def kill_engine(self, slot: int, role: str) -> None:
        pids = self.engine_pids(slot, role)
        assert pids and all(pid in processes.of_session(self.process.pid) for pid in pids), f"engine {pids} is gone"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def actor_pid(self) -> int:
        """The process of the actor worker on global rank 0, the one that publishes."""
        return self.ray_actor_pid("WorkerDict")

    def ray_actor_pid(self, name: str) -> int:
        """The process of the only Ray actor whose class is called so."""
        of_run = processes.of_session(self.process.pid)
        found = [pid for pid, line in of_run.items() if line.startswith(f"ray::{name}")]
        assert len(found) == 1, f"{name}: {found}"
        return found[0]

    # ---- the end ------------------------------------------------------------------------------------------------

    def remains(self, run_id: str | None, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
        """What is left of the run: processes, files of the parameter store, control groups. Empty when it is clean."""
        running = {**processes.of_session(self.process.pid), **processes.naming(str(self.store))}
        left = {
            "processes": {pid: line for pid, line in running.items() if line not in ignore},
            "store": [str(path) for path in self.store.iterdir()] if self.store.exists() else [],
            "groups": [str(group) for group in processes.cpu_groups(run_id)] if run_id else [],
        }
        return {what: found for what, found in left.items() if found}

    def assert_gone(self, ignore: tuple[str, ...] = (), deadline_s: float = GONE_S) -> None:
        """Everything of the run goes away within ``deadline_s``, processes with a command line of ``ignore`` aside."""
        run_id = self._find_run_id()
        processes.eventually(lambda: not self.remains(run_id, ignore), deadline_s)
        left = self.remains(run_id, ignore)
        assert not left, f"{deadline_s:g} s after the end of the run there still are {left}\n{self.tail()}"

    def close(self) -> None:
        """Kill whatever is left and remove what lies outside ``folder``."""
        run_id = self._find_run_id()
        processes.kill_all(lambda: processes.of_session(self.process.pid))
        self.process.wait()
        processes.kill_all(lambda: processes.naming(str(self.store)))
        for group in processes.cpu_groups(run_id) if run_id else []:
            for folder in [*group.iterdir(), group]:
                if folder.is_dir():
                    processes.eventually(lambda folder=folder: _removed(folder), 5.0)
        shutil.rmtree(self.ray_dir, ignore_errors=True)
        shutil.rmtree(self.store, ignore_errors=True)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        yield json.loads(line)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
