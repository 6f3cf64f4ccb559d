"""Every GPU recipe composes with verl's own configuration and passes the checks that a run makes before Ray.

Nothing here runs a recipe: that takes the GPUs it is written for.
"""

from __future__ import annotations

import copy
import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from tiny_models import DENSE, model_dir

from verl_pivot.cli.doctor import compose_verl_config
from verl_pivot.config.checks import run_checks, subject_of
from verl_pivot.config.completion import Invocation, complete, enabled
from verl_pivot.config.findings import errors_of
from verl_pivot.config.lookup import select, to_plain
from verl_pivot.config.machine import Machine, ModelOnDisk
from verl_pivot.verl_ext.switch import examine

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = ("grpo_genrm_fsdp", "grpo_genrm_megatron", "ppo_genrm")
GB = 10**9
# A node of 8 GPUs: what the checks look at, with models as if they had been downloaded.
NODE = Machine(
    cores=96,
    store_free_bytes=512 * GB,
    store_filesystem="tmpfs",
    policy=ModelOnDisk("Qwen/Qwen2.5-7B", True, True, True, int(15.2 * GB), is_16_bit=True),
    judge=ModelOnDisk("Qwen/Qwen3-30B-A3B", True, True, True, int(61.1 * GB), is_16_bit=True),
)
STRATEGY = {"grpo_genrm_fsdp": "fsdp2", "grpo_genrm_megatron": "megatron", "ppo_genrm": "fsdp2"}
OFFLOAD = {
    "grpo_genrm_fsdp": ("actor_rollout_ref.actor.fsdp_config",),
    "grpo_genrm_megatron": ("actor_rollout_ref.actor.megatron",),
    "ppo_genrm": ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp"),
}


def printed_overrides(name: str, *further: str) -> list[str]:
    command = ["bash", str(RECIPES / name / "run.sh"), "--print-overrides", *further]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@functools.cache
def composed(name: str, *further: str) -> tuple[DictConfig, Invocation]:
    return compose_verl_config(printed_overrides(name, *further), "ppo_trainer")


@functools.cache
def completed(name: str, *further: str) -> dict[str, Any]:
    config, invocation = composed(name, *further)
    assert complete(config, invocation) == []
    assert enabled(config)
    return to_plain(config)


@pytest.mark.parametrize("name", NAMES)
def test_checks_find_nothing(name: str) -> None:
    assert run_checks(subject_of(completed(name), NODE)) == []


@pytest.mark.parametrize("name", NAMES)
def test_doctor_finds_no_error_in_what_the_recipe_prints(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("VERL_PLATFORM", "http_proxy", "HTTP_PROXY"):  # of whoever runs the tests
        monkeypatch.delenv(variable, raising=False)
    rows = tmp_path / "rows.parquet"
    rows.touch()
    config, invocation = composed(name, f"data.train_files={rows}", f"data.val_files={rows}")
    findings = [finding for row in examine(config, invocation, {}) for finding in row.findings]
    assert errors_of(findings) == []


@pytest.mark.parametrize("name", NAMES)
def test_four_slots_of_two_gpus_as_the_readmes_say(name: str) -> None:
    layout = subject_of(completed(name), NODE).layout
    assert layout is not None
    assert [slot.pool for slot in layout.slots] == ["train", "train", "rollout", "genrm"]
    assert (layout.gpus_per_slot, layout.rollout_replicas_per_slot, layout.judge_replicas_per_slot) == (2, 2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_all_gpus_may_train_as_the_readme_says(name: str) -> None:
    readme = (RECIPES.parent / "README.md").read_text()
    all_of_them = re.search(r"give training all of them\s+\(`([^`]+)`\)", readme)
    assert all_of_them is not None
    subject = subject_of(completed(name, *all_of_them[1].split()), NODE)
    assert run_checks(subject) == [] and subject.layout is not None
    assert [slot.pool for slot in subject.layout.slots] == ["train"] * 4


@pytest.mark.parametrize("name", NAMES)
def test_whatever_trains_gives_its_memory_back(name: str) -> None:
    plain = completed(name)
    assert select(plain, "actor_rollout_ref.actor.strategy") == STRATEGY[name]
    for engine in OFFLOAD[name]:
        assert select(plain, f"{engine}.param_offload") is True
        assert select(plain, f"{engine}.optimizer_offload") is True


@pytest.mark.parametrize("name", NAMES)
def test_lengths_fit_into_the_engines(name: str) -> None:
    plain = completed(name)
    prompt, response = (int(select(plain, f"data.max_{part}_length")) for part in ("prompt", "response"))
    judge = {
        key: int(select(plain, f"reward.reward_model.rollout.{key}")) for key in ("prompt_length", "max_model_len")
    }
    verdict = int(select(plain, "reward.custom_reward_function.reward_kwargs.max_tokens"))
    assert prompt + response <= int(select(plain, "actor_rollout_ref.rollout.max_model_len"))
    assert prompt + response <= int(select(plain, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"))
    # the judge sees question and response, and some words around them
    assert prompt + response + 512 <= judge["prompt_length"]
    assert verdict <= int(select(plain, "reward.reward_model.rollout.response_length"))
    assert judge["prompt_length"] + verdict <= judge["max_model_len"]


@pytest.mark.parametrize("name", NAMES)
def test_reward_function_is_there(name: str) -> None:
    path = Path(str(select(completed(name), "reward.custom_reward_function.path")))
    assert path == RECIPES / "common" / "judge_reward.py"
    assert path.is_file()


def test_ppo_has_a_critic_and_grpo_has_none() -> None:
    advantage = {name: select(completed(name), "algorithm.adv_estimator") for name in NAMES}
    assert advantage == {"grpo_genrm_fsdp": "grpo", "grpo_genrm_megatron": "grpo", "ppo_genrm": "gae"}


@pytest.mark.parametrize(
    ("further", "option"),
    [
        (
            "reward.reward_model.rollout.tensor_model_parallel_size=4",
            "reward.reward_model.rollout.tensor_model_parallel",
        ),
        ("trainer.n_gpus_per_node=5", "trainer.n_gpus_per_node"),
        ("data.train_batch_size=100", "data.train_batch_size"),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload=false",
            "actor_rollout_ref.actor.fsdp_config.param_offload",
        ),
    ],
)
def test_further_overrides_count_and_wrong_ones_are_found(further: str, option: str) -> None:
    findings = run_checks(subject_of(completed("grpo_genrm_fsdp", further), NODE))
    assert findings and findings[0].option.startswith(option)


@pytest.mark.parametrize("name", NAMES)
def test_every_override_is_given_once(name: str) -> None:
    options = [override.lstrip("+").split("=", 1)[0] for override in printed_overrides(name)]
    assert sorted(options) == sorted(set(options))


@pytest.mark.parametrize("name", NAMES)
def test_readme_names_only_options_that_the_recipe_or_verl_knows(name: str) -> None:
    text = (RECIPES / name / "README.md").read_text(encoding="utf-8")
    options = set(re.findall(r"`\+?((?:actor_rollout_ref|critic|data|reward|trainer|algorithm)(?:\.\w+)+)", text))
    plain = completed(name)
    absent = object()
    unknown = {option for option in options if _lookup(plain, option, absent) is absent}
    assert options and unknown == set()


def _lookup(plain: dict[str, Any], option: str, absent: object) -> Any:
    node: Any = plain
    for key in option.split("."):
        if not isinstance(node, dict) or key not in node:
            return absent
        node = node[key]
    return node


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_verls_own_check_accepts_it(name: str) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    completed(name)
    config = copy.deepcopy(composed(name)[0])
    config.critic.model.path = model_dir(DENSE)  # verl reads the critic's, and a test downloads nothing
    original = getattr(validate_config, "__wrapped__", validate_config)  # ours ran above, on another machine
    original(config, need_reference_policy(config), need_critic(config))
    assert need_critic(config) == (name == "ppo_genrm")
