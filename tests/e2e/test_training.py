"""Whole runs that nothing disturbs, and one that is killed and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

import pytest
from e2e.accounts import assert_adds_up, assert_judged_once, assert_versions_served, worst_staleness
from e2e.launch import RAY_AGENTS, Run
from e2e.toy_task import Assets, overrides, prompt_index

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(2400)]


def test_synchronous(start_run: Callable[..., Run], assets: Assets) -> None:
    """On-policy GRPO with validation and checkpoints: all roles shift, all adds up, engines agree with the trainer."""
    run = start_run({**overrides(assets), "trainer.test_freq": 2, "trainer.save_freq": 2})
    report = run.finish()

    assert report["outcome"] == "finished"
    assert_adds_up(run, report, steps=[1, 2, 3], prompts=4, n=4)
    assert_judged_once(run, n=4)
    assert_versions_served(run, last=3)
    assert worst_staleness(run) == 0
    assert report["probs_diff_max"] < 1e-5
    assert {"rollout->genrm", "genrm->rollout"} <= set(report["shift_counts"])
    assert any(shift.endswith("->train") for shift in report["shift_counts"])
    assert any(shift.startswith("train->") for shift in report["shift_counts"])
    assert set(report["shift_outcomes"]) <= {"done", "cancelled"}  # the last validation may end in the midst of shifts
    assert "val-core/toy/acc/mean@1" in run.metrics()[2]
    assert (run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"
    run.assert_gone()


def test_killed_and_resumed(start_run: Callable[..., Run], assets: Assets) -> None:
    """Asynchronous with two mini-batches a step, under the planner that looks ahead. kill -9 of the driver leaves
    nothing on the machine, and the next run goes on from the checkpoint, with the prompts that were on their way when
    it was written, and with what was learned of lengths."""
    settings = {
        **overrides(assets),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "trainer.resource_shift.train.mini_batches_per_step": 2,
        "trainer.resource_shift.staleness": 1,
        "trainer.resource_shift.planner.name": "lookahead",
        "trainer.save_freq": 2,
        "trainer.resume_mode": "auto",
        "trainer.total_training_steps": 100,
        "trainer.total_epochs": 100,
    }
    first = start_run(settings, name="first")
    first.wait_step(2)
    first.wait_load("rollout", step=2)
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait_end()
    first.assert_gone(ignore=RAY_AGENTS)

    second = start_run({**settings, "trainer.total_training_steps": 8}, name="second")
    report = second.finish()
    resumed = min(second.trained())
    assert resumed in (3, 5), "checkpoints were written at steps 2 and maybe 4"
    assert_adds_up(second, report, steps=list(range(resumed, 9)), prompts=4, n=4)
    assert_versions_served(second, last=8, staleness=1)
    assert max(worst_staleness(first), worst_staleness(second)) <= 1
    trained = _prompts_of(first, range(1, resumed)) + _prompts_of(second, range(resumed, 9))
    assert len(set(trained)) == len(trained) == 32, "a prompt was lost, or trained on twice"
    _assert_looked_ahead(first, second)
    second.assert_gone()


def _assert_looked_ahead(first: Run, second: Run) -> None:
    """Lengths were predicted, from all sequences and each once, and what the first run learned was not lost."""
    assert any("of slot-time of use" in plan["reason"] for plan in first.events("plan") + second.events("plan"))
    assert "lengths are learned anew" not in second.log()
    books = {event["role"]: event for event in second.events("sequences")}
    assert all(books[role]["whole"] >= 4 * 4 for role in ("rollout", "genrm")), books
    assert all(book["begun"] == book["whole"] + book["cut_off"] + book["open"] for book in books.values())


def _prompts_of(run: Run, steps: Iterable[int]) -> list[int]:
    """Indices of the prompts that were trained on in ``steps``, each once for each step."""
    trained = run.trained()
    return [index for step in steps for index in sorted({prompt_index(r["input"]) for r in trained[step]})]


def test_critic_then_ctrl_c(start_run: Callable[..., Run], assets: Assets) -> None:
    """PPO with a critic on the train slots; then ctrl-C in the middle of a step, which leaves nothing behind."""
    run = start_run(
        {
            **overrides(assets, rollout_slots=1),
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.rollout.n": 2,
            "critic.model.path": assets.policy,
            "critic.model.tokenizer_path": assets.policy,
            "critic.optim.lr": 1e-4,
            "critic.ppo_mini_batch_size": 4,
            "critic.ppo_micro_batch_size_per_gpu": 8,
            "trainer.total_training_steps": 100,
            "trainer.total_epochs": 100,
        }
    )
    run.wait_step(2)
    run.wait_load("rollout", step=2)
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    assert run.wait_end() != 0
    run.assert_gone()

    spans = {span["name"] for span in run.events("span")}
    assert {"values", "update_critic", "update_actor", "publish"} <= spans
    for step in run.events("step")[:2]:
        assert (step["prompts"], step["responses"], step["rewards"]) == (4, 8, 8)
        assert step["probs_diff_max"] < 1e-5
    assert run.metrics()[2]["critic/vf_loss"] > 0
