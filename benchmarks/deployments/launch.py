"""Runs one deployment as a process of its own, watches its steps, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployments import shm_backend
from benchmarks.deployments.announce import RUN_DIRECTORY
from benchmarks.deployments.measure import StepSample
from benchmarks.deployments.probe import SpeedProbe
from benchmarks.deployments.processes import RunProcesses, machine_usage_s
from benchmarks.deployments.slots import HeldByBenchmark, HeldByRun, NotPlaced
from benchmarks.deployments.variants import Variant, overrides
from benchmarks.deployments.workload import Assets, Workload
from verl_pivot.config.machine import own_address

REPOSITORY = Path(__file__).resolve().parents[2]
STEP_FILE = "steps.jsonl"
_LOOK_S = 0.2
_READ_S = 0.02
_PLACE_S = 20.0


class DeploymentFailed(RuntimeError):
    """A deployment did not get through; the message says why and where its log is."""


@dataclass(frozen=True)
class Limits:
    """How long a deployment may take."""

    start_s: float = 900.0
    step_s: float = 240.0


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    steps: list[StepSample]
    """All steps, warm-up included."""
    start_s: float
    memory_bytes: int
    shares: str
    observed: dict[str, Any] | None
    """resource_shift's own report of the run."""


class DeploymentRun:
    """One run of one variant. ``progress`` is called with a few words on what is going on."""

    def __init__(
        self,
        variant: Variant,
        workload: Workload,
        assets: Assets,
        run: Path,
        steps: int,
        share: float,
        limits: Limits,
        progress: Callable[[str], None],
    ) -> None:
        self._variant, self._run, self._steps = variant, run, steps
        self._limits, self._progress = limits, progress
        self._log = run / "log.txt"
        self._ray = Path(f"/tmp/vpb{os.getpid()}_{int(time.time())}")
        self._arguments = [
            *overrides(variant, workload, assets, run, steps, share),
            f"+ray_kwargs.ray_init._temp_dir={self._ray}",
        ]
        self._sequences = workload.prompts_per_step * workload.responses_per_prompt
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        self._found = RunProcesses(run)
        self._probe = SpeedProbe()
        if variant.kind == "resource_shift":
            self._held: HeldByBenchmark | HeldByRun = HeldByRun(variant, self._found)
        else:
            self._held = HeldByBenchmark(variant, run, share, self._found)

    def execute(self) -> Outcome:
        """Run to the end. Raises DeploymentFailed; whatever happens, no process of the run survives."""
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *self._arguments]
        (self._run / "command.json").write_text(json.dumps(command, indent=1))
        started_s = time.monotonic()
        with self._log.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self._run, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
            try:
                start_s = self._wait_for_start(process, started_s)
                steps = self._watch_steps(process)
                memory_bytes = self._found.memory_bytes()
                self._wait_for_end(process)
            except NotPlaced as error:
                raise self._failure(str(error)) from error
            finally:
                self._clean_up(process)
        return Outcome(steps, start_s, memory_bytes, self._held.describe(), self._observed())

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        loopback = "localhost,127.0.0.1,0.0.0.0"
        return {
            **kept,
            RUN_DIRECTORY: str(self._run),
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(self._run / STEP_FILE),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), kept.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            # trainer_separate_async.py:184 passes an unknown argument to a log call that is only made at INFO, and dies
            "VERL_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
            "no_proxy": ",".join(filter(None, [kept.get("no_proxy"), loopback, own_address() or ""])),
        }

    def _wait_for_start(self, process: subprocess.Popen[bytes], started_s: float) -> float:
        """Until the trainer has everything up (it opens its step log then); places all compute processes."""
        self._progress("starting")
        while not (self._run / STEP_FILE).exists():
            self._check(process, started_s, self._limits.start_s, "did not start")
            time.sleep(_LOOK_S)
        deadline_s = time.monotonic() + _PLACE_S
        while True:
            self._found.refresh()
            try:
                self._held.hold()
                return time.monotonic() - started_s
            except NotPlaced:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_LOOK_S)

    def _watch_steps(self, process: subprocess.Popen[bytes]) -> list[StepSample]:
        """Sample the slots' CPU time and the machine's speed at the end of each step."""
        samples: list[StepSample] = []
        self._probe.take()
        last = self._read()
        looked_s = time.monotonic()
        with (self._run / STEP_FILE).open() as lines:
            text = ""
            while len(samples) < self._steps:
                text += lines.readline()
                if text.endswith("\n"):
                    now = self._read()
                    samples.append(self._sample(json.loads(text), last, now))
                    last, text = now, ""
                    self._progress(f"step {len(samples)} of {self._steps}: {samples[-1].step_s:.1f} s")
                    continue
                self._check(process, last[0], self._limits.step_s, f"step {len(samples) + 1} did not end")
                if time.monotonic() - looked_s > _LOOK_S:
                    self._found.refresh()
                    self._held.hold()
                    looked_s = time.monotonic()
                time.sleep(_READ_S)
        return samples

    def _read(self) -> tuple[float, tuple[float, ...], dict[str, float], float]:
        return time.monotonic(), self._held.usage_s(), self._held.role_usage_s(), machine_usage_s()

    def _sample(self, line: dict[str, Any], last: Any, now: Any) -> StepSample:
        data = line["data"]
        prefix = "timing_s/"
        timing_s = {key.removeprefix(prefix): float(v) for key, v in data.items() if key.startswith(prefix)}
        stale = "training/off_policy/trajectory_staleness"
        slot_cpu_s = tuple(after - before for before, after in zip(last[1], now[1], strict=True))
        return StepSample(
            step=int(line["step"]),
            step_s=timing_s.pop("step"),
            wall_s=now[0] - last[0],
            response_tokens=round(data["response_length/mean"] * self._sequences),
            slot_cpu_s=slot_cpu_s,
            machine_speed=self._probe.take(),
            outside_cpu_s=max(0.0, now[3] - last[3] - sum(slot_cpu_s)),
            role_cpu_s={role: used - last[2].get(role, 0.0) for role, used in now[2].items()},
            timing_s={key: value for key, value in timing_s.items() if "/" not in key},
            staleness_mean=data.get(f"{stale}/mean"),
            staleness_max=data.get(f"{stale}_worst/max"),
        )

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> None:
        """The figures are complete; a run that then does not end by itself is ended."""
        self._progress("ending")
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            return
        if code:
            raise self._failure(f"exit code {code} after its last step")

    def _check(self, process: subprocess.Popen[bytes], since_s: float, limit_s: float, what: str) -> None:
        if process.poll() is not None:
            raise self._failure(f"{what}: exit code {process.returncode}")
        if time.monotonic() - since_s > limit_s:
            raise self._failure(f"{what} within {limit_s:g} s")

    def _failure(self, why: str) -> DeploymentFailed:
        return DeploymentFailed(f"{self._variant.name} {why}; its log is {self._log}")

    def _clean_up(self, process: subprocess.Popen[bytes]) -> None:
        self._probe.close()
        self._found.kill()
        process.wait()
        self._held.close()
        shutil.rmtree(self._ray, ignore_errors=True)
        shutil.rmtree(shm_backend.directory(self._run), ignore_errors=True)

    def _observed(self) -> dict[str, Any] | None:
        reports = list((self._run / "observe").glob("*/report.json"))
        return json.loads(reports[0].read_text()) if reports else None
