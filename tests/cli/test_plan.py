"""``verl-pivot plan`` for a recipe's configuration, and its answers."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl_pivot.cli.main import app
from verl_pivot.sim.advice import Answer, question_of
from verl_pivot.sim.deployments import Deployment, Split
from verl_pivot.sim.ledger import Ledger
from verl_pivot.sim.models import CostFile
from verl_pivot.sim.result import SimResult

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_response_length=1000"]


@pytest.fixture(scope="module")
def recipe() -> list[str]:
    command = ["bash", str(ROOT / "recipes" / "grpo_genrm_fsdp" / "run.sh"), "--print-overrides", *SMALL]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[:-1]


def test_a_recipe_gets_a_verdict(recipe: list[str]) -> None:
    options = ["--gpu", "H20", "--tries", "2", "--staleness", "0", "--judge-median", "200"]
    result = CliRunner().invoke(app, ["plan", *options, *recipe], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Qwen2.5-7B judged by Qwen3-30B-A3B, 8 x H20" in " ".join(result.output.split())
    assert "Worth it: " in result.output or "Leave it off: " in result.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["reward.reward_model.enable=false"], "reward.reward_model.enable is not true"),
        (["actor_rollout_ref.model.path=/models/my-own"], "actor_rollout_ref.model.path is /models/my-own"),
        (["reward.reward_model.rollout.tensor_model_parallel_size=1"], "no costs for Qwen3-30B-A3B at tp 1"),
        (["data.train_batch_size=0"], "prompts_per_step is 0"),
        (["--gpu", "B300"], "no hardware named B300"),
        (["--costs", "nowhere.json"], "nowhere.json cannot be read"),
        (["trainer.no_such_thing=1"], "no_such_thing"),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=7"],
            "ppo_mini_batch_size is 7: it must divide data.train_batch_s",
        ),
        (["--tries", "0"], "--tries is 0"),
        (["--response-median", "0"], "--response-median is 0"),
    ],
)
def test_what_cannot_be_planned_is_named(recipe: list[str], more: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", *recipe, *more])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


def made(deployment: Deployment, tokens_per_s: float, staleness: int) -> SimResult:
    ledger = Ledger(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    split = Split(2, 1, 1)
    return SimResult(deployment, split, staleness, tokens_per_s, 10.0, (10.0,), 8.0, 0, 0, 0, ledger)


def test_the_verdict_follows_the_gain() -> None:
    ours, rival = made(Deployment.HARMONIC, 120.0, 1), made(Deployment.ENABLE_SWITCH, 100.0, 1)
    worth = Answer({1: [ours, rival]}, ours, rival)
    assert worth.is_worth_it and worth.words().startswith("Worth it: resource_shift with the harmonic planner, ")
    assert "staleness 1 and slots 2/1/1 (train/rollout/genrm) makes 1.20 times" in worth.words()
    even = replace(worth, best=replace(ours, tokens_per_s=101.0))
    assert even.words() == (
        "Leave it off: enable_switch (2/1/1) at staleness 1 does as well; shifting makes 1.01 times as many tokens at "
        "most, and is advised from 1.05 on."
    )


def test_the_verdict_can_be_pasted() -> None:
    ours, rival = made(Deployment.LOOKAHEAD, 120.0, 1), made(Deployment.ENABLE_SWITCH, 100.0, 1)
    best = replace(ours, split=Split(6, 1, 2))
    assert Answer({1: [best, rival]}, best, rival).overrides(slot_gpus=4) == [
        "+resource_shift@_global_=pivot",
        "trainer.resource_shift.planner.name=lookahead",
        "trainer.resource_shift.staleness=1",
        "trainer.resource_shift.slots.gpus_per_slot=4",
        "trainer.nnodes=3",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.n_gpus_per_node=8",
    ]


def test_names_are_found_in_paths_longest_first() -> None:
    config: dict[str, Any] = {
        "actor_rollout_ref": {
            "model": {"path": "/models/Qwen2.5-7B-Instruct"},
            "rollout": {"tensor_model_parallel_size": 1, "n": 4, "nnodes": 1, "n_gpus_per_node": 4},
            "actor": {"ppo_mini_batch_size": 8},
        },
        "reward": {
            "reward_model": {
                "enable": True,
                "model_path": "org/qwen3-30b-a3b-thinking",
                "rollout": {"tensor_model_parallel_size": 2, "response_length": 2000, "prompt_length": 4000},
            }
        },
        "data": {"train_batch_size": 16, "max_response_length": 4000, "max_prompt_length": 200},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 4},
    }
    given: dict[str, Any] = dict.fromkeys(("policy", "judge", "response_median", "judge_median"))
    question = question_of(config, CostFile.read(), "H20", **given)
    assert (question.cluster.policy.name, question.cluster.judge.name) == ("Qwen2.5-7B", "Qwen3-30B-A3B")
    assert question.cluster.judge.tp == 2 and question.cluster.gpus == 8
    assert question.workload.response.median_tokens == 800 and question.workload.mini_batches == 2
