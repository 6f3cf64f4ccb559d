"""Runs in which something breaks: what can be survived is, and nothing is lost; what cannot ends in one clear error."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.accounts import assert_adds_up, assert_judged_once, assert_versions_served, worst_staleness
from e2e.launch import Run
from e2e.toy_rewards import DEFAULT_SCORE, SILENCE_S
from e2e.toy_task import Assets, overrides, prompt_index

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(2400)]

BROKEN, SILENT = 2, 5
MIB = 1024 * 1024


def test_chaos(start_run: Callable[..., Run], assets: Assets) -> None:
    """Engines of both roles are killed while they work, judges write garbage or say nothing, the reward function
    raises: the run goes on to its end, and every prompt ends once, trained on or failed with its reason."""
    kwargs = "+reward.custom_reward_function.reward_kwargs"
    run = start_run(
        {
            **overrides(assets),
            "reward.custom_reward_function.name": "compute_score_in_chaos",
            f"{kwargs}.broken_index": BROKEN,
            f"{kwargs}.silent_index": SILENT,
            "data.max_response_length": 192,
            "trainer.resource_shift.staleness": 1,
            "trainer.total_training_steps": 6,
        }
    )
    rollout_slot = run.wait_load("rollout")
    run.kill_engine(rollout_slot, "rollout")
    run.until(lambda: "rollout" in _failed(run), "the rollout engine's slot was marked failed")
    genrm_slot = run.wait_load("genrm", among=lambda slot: slot != rollout_slot)
    run.kill_engine(genrm_slot, "genrm")
    run.until(lambda: "genrm" in _failed(run), "the judge engine's slot was marked failed")
    report = run.finish()

    assert_adds_up(run, report, steps=[1, 2, 3, 4, 5, 6], prompts=4, n=4)
    assert_judged_once(run, n=4)
    assert_versions_served(run, last=6, staleness=1)
    assert worst_staleness(run) <= 1
    assert "rollout engine lost while generating" in run.log()
    assert all(failure["recovered_s"] is not None for failure in report["failures"])

    trained = Counter(prompt_index(r["input"]) for responses in run.trained().values() for r in responses)
    assert BROKEN not in trained and SILENT not in trained
    assert run.events("run_end")[-1]["dropped"] == 2
    assert f"the reward function cannot grade prompt {BROKEN}" in run.log()
    assert f"no verdict within deadline_s={SILENCE_S}" in run.log()
    calls = Counter(note["index"] for note in run.ledger() if note["score"] is None)
    assert calls == {BROKEN: 4, SILENT: 4}
    assert {n["score"] for n in run.ledger() if n["score"] is not None} == {DEFAULT_SCORE}
    run.assert_gone()


def _failed(run: Run) -> set[str]:
    return {event["role"] for event in run.events("slot_failed")}


def test_actor_killed(start_run: Callable[..., Run], assets: Assets) -> None:
    """Without the process that trains and publishes there is nothing to go on with."""
    run = start_run({**overrides(assets, rollout_slots=1), "trainer.total_training_steps": 50})
    run.wait_load("rollout", step=1)
    actor = run.actor_pid()
    os.kill(actor, signal.SIGKILL)
    assert run.wait_end(deadline_s=90) != 0
    assert "ActorDiedError" in run.log()
    assert f"pid: {actor}" in run.log()
    assert (run.report()["outcome"], run.report()["lost"]) == ("failed", 0)
    run.assert_gone()


def test_queue_killed(start_run: Callable[..., Run], assets: Assets) -> None:
    """verl asks TransferQueue without a deadline: the run must end all the same, and say what is gone."""
    run = start_run({**overrides(assets, rollout_slots=1), "trainer.total_training_steps": 50})
    run.wait_load("rollout", step=1)
    os.kill(run.ray_actor_pid("TransferQueueController"), signal.SIGKILL)
    assert run.wait_end(deadline_s=90) != 0
    assert "the TransferQueue controller is gone" in run.log()
    assert (run.report()["outcome"], run.report()["lost"]) == ("failed", None)
    run.assert_gone()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for three versions of the toy policy, the judge and a little more."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def test_full_store(start_run: Callable[..., Run], assets: Assets, small_tmpfs: Path) -> None:
    """Shared memory fills up while the run goes on: the run ends with an error that says what to do."""
    run = start_run(
        {
            **overrides(assets, rollout_slots=1),
            "trainer.resource_shift.store.reserve_bytes": MIB,
            "trainer.resource_shift.store.shard_bytes": MIB,
            "trainer.total_training_steps": 50,
        },
        store=small_tmpfs / "store",
    )
    run.wait_step(1)
    ballast = small_tmpfs / "ballast"
    free = os.statvfs(small_tmpfs).f_bavail * os.statvfs(small_tmpfs).f_frsize
    ballast.write_bytes(b"\0" * (free - MIB // 2))
    assert run.wait_end() != 0
    log = run.log()
    for text in (
        "StoreFull: the parameter store is full",
        "is still served",
        "trainer.resource_shift.store.directory",
        "trainer.resource_shift.store.keep_versions",
    ):
        assert text in log
    published = [event["version"] for event in run.events("publish")]
    assert_versions_served(run, last=published[-1])
    assert (run.report()["outcome"], run.report()["lost"]) == ("failed", 0)
    run.assert_gone()
