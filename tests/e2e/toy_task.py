"""A toy task for whole runs: random models, prompts such as ``add 3+4``, and the overrides that make a run tiny."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models

Overrides = dict[str, Any]
_QUESTION = re.compile(r"add (\d+)\+\d")
REWARDS = Path(__file__).with_name("toy_rewards.py")


@dataclass(frozen=True)
class Assets:
    """Files that every run shares."""

    policy: str
    judge: str
    train: Path
    val: Path


def make_assets(folder: Path, prompts: int = 32) -> Assets:
    """Write data under ``folder`` and two models into the session's model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    return Assets(
        policy=tiny_models.model_dir(tiny_models.DENSE, seed=1),
        judge=tiny_models.model_dir(tiny_models.DENSE, seed=2),
        train=_write(folder / "train.parquet", range(prompts)),
        val=_write(folder / "val.parquet", range(prompts, prompts + 4)),
    )


def _write(path: Path, indices: Iterable[int]) -> Path:
    import pyarrow
    import pyarrow.parquet

    rows = []
    for index in indices:
        one, other = index, (3 * index) % 10  # no two prompts are alike
        rows.append(
            {
                "data_source": "toy",
                "prompt": [{"role": "user", "content": f"add {one}+{other}"}],
                "ability": "toy",
                "reward_model": {"style": "rule", "ground_truth": str(one + other)},
                "extra_info": {"index": index, "question": f"add {one}+{other}"},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def prompt_index(text: str) -> int:
    """Index of the prompt that ``text`` was made from."""
    match = _QUESTION.search(text)
    assert match is not None, text
    return int(match.group(1))


def overrides(assets: Assets, *, rollout_slots: int = 2, genrm_slots: int = 1) -> Overrides:
    """GRPO, 4 prompts x 4 responses, on one train slot and the given numbers of shared slots."""
    rollout, judge, actor = "actor_rollout_ref.rollout", "reward.reward_model", "actor_rollout_ref.actor"
    return {
        "trainer.n_gpus_per_node": 1,
        "ray_kwargs.ray_init.num_gpus": 1 + rollout_slots + genrm_slots,
        f"{rollout}.nnodes": 1 if rollout_slots else 0,
        f"{rollout}.n_gpus_per_node": rollout_slots,
        f"{judge}.enable": True,
        f"{judge}.enable_resource_pool": True,
        f"{judge}.nnodes": 1,
        f"{judge}.n_gpus_per_node": genrm_slots,
        f"{judge}.model_path": assets.judge,
        f"{judge}.rollout.prompt_length": 256,
        f"{judge}.rollout.response_length": 64,
        f"{judge}.rollout.max_model_len": 320,
        "reward.custom_reward_function.path": REWARDS,
        "actor_rollout_ref.model.path": assets.policy,
        "data.train_files": assets.train,
        "data.val_files": assets.val,
        "data.train_batch_size": 4,
        "data.shuffle": False,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "algorithm.adv_estimator": "grpo",
        f"{rollout}.n": 4,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 8,
        f"{rollout}.max_model_len": 320,
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 8,
        f"{actor}.use_kl_loss": False,
        f"{actor}.optim.lr": 1e-4,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": 3,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.resource_shift.planner.cooldown_s": 0.5,
        "trainer.resource_shift.planner.immunity_s": 0.5,
        "trainer.resource_shift.planner.interval_s": 0.25,
    }
