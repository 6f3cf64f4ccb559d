"""verl's real configuration, composed once per set of overrides, and small changes to it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl_pivot.cli.doctor import compose_verl_config
from verl_pivot.config.checks import run_checks, subject_of
from verl_pivot.config.completion import Invocation, complete
from verl_pivot.config.findings import Finding
from verl_pivot.config.lookup import to_plain
from verl_pivot.config.machine import Machine, ModelOnDisk

GROUP = "+resource_shift@_global_=pivot"
CPU = "+pivot_platform@_global_=cpu"
GIB = 2**30
MODEL = ModelOnDisk("/models/policy", True, True, True, GIB)
MACHINE = Machine(
    cores=8,
    environ={"VERL_PLATFORM": "cpu"},
    store_free_bytes=64 * GIB,
    store_filesystem="tmpfs",
    policy=MODEL,
    judge=MODEL,
)
GPU_MACHINE = Machine(8, {}, 64 * GIB, "tmpfs", MODEL, MODEL, address="10.1.2.3")

_SIZES = {
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.nnodes": 1,
    "reward.reward_model.enable": True,
    "reward.reward_model.enable_resource_pool": True,
    "reward.reward_model.nnodes": 1,
    "reward.reward_model.model_path": "/models/judge",
    "reward.custom_reward_function.path": "reward.py",
}
_GPU = {
    "trainer.n_gpus_per_node": 4,
    "reward.reward_model.n_gpus_per_node": 4,
    "actor_rollout_ref.rollout.name": "vllm",
    "reward.reward_model.rollout.name": "vllm",
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
}


@functools.cache
def _composed(overrides: tuple[str, ...]) -> tuple[DictConfig, Invocation]:
    return compose_verl_config(list(overrides), "ppo_trainer")


def composed(*overrides: str) -> tuple[DictConfig, Invocation]:
    """A private copy of verl's configuration with ``overrides``, and what was typed.

    Composing takes a second, so hydra composes the groups only and the rest is set as hydra would set it.
    """
    groups = tuple(override for override in overrides if "." not in override.split("=")[0])
    base, invocation = _composed(groups)
    config = copy.deepcopy(base)
    for override in overrides:
        if override not in groups:
            option, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, option, yaml.safe_load(value), force_add=True)
    return config, Invocation(overrides, invocation.choices)


@functools.cache
def _completed(device: str) -> dict[str, Any]:
    config, invocation = composed(GROUP, *([CPU] if device == "cpu" else []))
    assert complete(config, invocation) == []
    return to_plain(config)


def good(device: str = "cpu", changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A completed configuration without findings: a slot (CPU) or two slots of two GPUs per pool; then changed."""
    plain = copy.deepcopy(_completed(device))
    for option, value in {**_SIZES, **(_GPU if device == "gpu" else {}), **(changes or {})}.items():
        put(plain, option, value)
    if device == "gpu" and "actor_rollout_ref.rollout.n_gpus_per_node" not in (changes or {}):
        put(plain, "actor_rollout_ref.rollout.n_gpus_per_node", 4)
    return plain


def put(plain: dict[str, Any], option: str, value: Any) -> None:
    *parents, last = option.split(".")
    node = plain
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value


def found(device: str, changes: Mapping[str, Any], machine: Machine | None = None) -> list[Finding]:
    """What the checks find in a good configuration with ``changes``."""
    default = MACHINE if device == "cpu" else GPU_MACHINE
    return run_checks(subject_of(good(device, changes), machine or default))
