from __future__ import annotations

import functools
from typing import Any

import pytest
import yaml
from config_cases import CPU, GROUP, composed
from omegaconf import DictConfig, OmegaConf

import verl_pivot.config as config_package
from verl_pivot.config.completion import (
    Invocation,
    complete,
    is_requested,
    resource_shift_config,
)
from verl_pivot.config.lookup import to_plain
from verl_pivot.config.node import valid_keys
from verl_pivot.config.schema import ResourceShiftConfig

RS = "trainer.resource_shift"
ASYNC = "trainer.v1.separate_async"
MINI = "mini_batches_per_step"


def completed(*overrides: str) -> DictConfig:
    config, invocation = composed(*overrides)
    assert complete(config, invocation) == []
    return config


def test_group_holds_every_default() -> None:
    path = f"{next(iter(config_package.__path__))}/resource_shift/pivot.yaml"
    with open(path) as file:
        group = yaml.safe_load(file)
    defaults = OmegaConf.to_container(OmegaConf.structured(ResourceShiftConfig))
    assert group["trainer"]["resource_shift"] == {**defaults, "enable": True}


@pytest.mark.parametrize("platform", [(), (CPU,)])
@pytest.mark.parametrize("flag", [f"+{RS}=true", f"+{RS}.enable=true", f"++{RS}.enable=true"])
def test_flag_is_completed_to_the_same_as_the_group(flag: str, platform: tuple[str, ...]) -> None:
    assert to_plain(completed(flag, *platform)) == to_plain(completed(GROUP, *platform))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"trainer.v1.trainer_mode": "resource_shift", "trainer.v1.sampler.max_off_policy_threshold": None}),
        ((f"{RS}.staleness=2",), {"trainer.v1.sampler.max_off_policy_threshold": 3}),
        ((f"{RS}.staleness=2",), {"trainer.v1.sampler.max_off_policy_strategy": "wait"}),
        ((f"{RS}.train.mini_batches_per_step=4",), {"trainer.v1.resource_shift.parameter_sync_step": 4}),
        ((), {"actor_rollout_ref.rollout.checkpoint_engine.backend": "pivot_store"}),
    ],
)
def test_verl_options_follow_from_ours(overrides: tuple[str, ...], expected: dict[str, Any]) -> None:
    config = completed(GROUP, *overrides)
    for option, value in expected.items():
        assert OmegaConf.select(config, option) == value


def test_completing_twice_changes_nothing() -> None:
    once = completed(GROUP, f"{RS}.staleness=1")
    before = to_plain(once)
    assert complete(once, Invocation()) == []
    assert to_plain(once) == before


@pytest.mark.parametrize(
    ("overrides", "option", "in_way_out"),
    [
        ((GROUP, f"+{RS}.stalness=1"), f"{RS}.stalness", f"did you mean {RS}.staleness"),
        ((GROUP, f"+{RS}.planner.intervall_s=1"), f"{RS}.planner.intervall_s", f"{RS}.planner.interval_s"),
        ((GROUP, f"+{RS}.interval_s=1"), f"{RS}.interval_s", f"did you mean {RS}.planner.interval_s"),
        ((GROUP, f"+{RS}.qqqqqq=1"), f"{RS}.qqqqqq", "options here: enable, staleness"),
        ((f"+{RS}.enabel=true",), f"{RS}.enabel", f"did you mean {RS}.enable"),
        (
            (GROUP, f"{RS}.staleness=soon"),
            f"{RS}.staleness",
            f"set {RS}.staleness to a whole number, such as 0 (the default)",
        ),
        (
            (GROUP, f"{RS}.staleness=1.5"),
            f"{RS}.staleness",
            f"set {RS}.staleness to a whole number, such as 0 (the default)",
        ),
        (
            (GROUP, f"{RS}.staleness=null"),
            f"{RS}.staleness",
            f"set {RS}.staleness to a whole number, such as 0 (the default)",
        ),
        (
            (GROUP, f"{RS}.enable=maybe"),
            f"{RS}.enable",
            f"set {RS}.enable to true or false, such as false (the default)",
        ),
        ((GROUP, f"{RS}.planner=harmonic"), f"{RS}.planner", f"such as {RS}.planner.name"),
        (
            (GROUP, f"{RS}.planner.margin=wide"),
            f"{RS}.planner.margin",
            "to a finite number, such as 0.05 (the default)",
        ),
        ((GROUP, f"{RS}.planner.name=null"), f"{RS}.planner.name", "to a text, such as harmonic (the default)"),
        ((f"+{RS}=on_please",), RS, f"+{RS}=true"),
        ((f"+{RS}.enable=true", "trainer.v1.trainer_mode=separate_async"), "trainer.v1.trainer_mode", "leave"),
        ((f"+{RS}.enable=true", "trainer.v1.trainer_mode=sync"), "trainer.v1.trainer_mode", "leave"),
        ((GROUP, "trainer.v1.trainer_mode=sync"), "trainer.v1.trainer_mode", f"to switch off, remove {GROUP}"),
        (("trainer.v1.trainer_mode=resource_shift",), "trainer.v1.trainer_mode", GROUP),
        ((GROUP, f"{RS}.enable=false"), f"{RS}.enable", f"remove {GROUP}"),
        ((GROUP, f"{RS}.enable=false", "trainer.v1.trainer_mode=separate_async"), f"{RS}.enable", f"remove {GROUP}"),
        ((GROUP, f"{ASYNC}.parameter_sync_step=2"), f"{ASYNC}.parameter_sync_step", f"{RS}.train.{MINI}=2"),
        ((GROUP, f"{ASYNC}.parameter_sync_step=4"), f"{ASYNC}.parameter_sync_step", f"{RS}.train.{MINI}=4"),
        ((GROUP, f"{ASYNC}.num_warmup_batches=1"), f"{ASYNC}.num_warmup_batches", f"{RS}.staleness says"),
        (("+resource_shift=pivot",), "+resource_shift", GROUP),
        (("+resource_shift.enable=true",), "+resource_shift", GROUP),
        (
            (GROUP, "trainer.v1.sampler.max_off_policy_threshold=4"),
            "trainer.v1.sampler.max_off_policy_threshold",
            "staleness decides it",
        ),
        (
            (GROUP, "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"),
            "actor_rollout_ref.rollout.checkpoint_engine.backend",
            "leave it out",
        ),
        (
            (GROUP, "+trainer.v1.resource_shift.parameter_sync_step=3"),
            "trainer.v1.resource_shift.parameter_sync_step",
            "mini_batches_per_step decides it",
        ),
    ],
)
def test_wrong_requests_name_the_option_and_the_way_out(
    overrides: tuple[str, ...], option: str, in_way_out: str
) -> None:
    config, invocation = composed(*overrides)
    assert is_requested(config, invocation)
    findings = complete(config, invocation)
    assert [finding.option for finding in findings] == [option]
    assert findings[0].severity == "error"
    assert in_way_out in findings[0].way_out


@pytest.mark.parametrize("value", ["nan", ".nan", ".inf", "-.inf"])
def test_every_number_is_finite(value: str) -> None:
    defaults = ResourceShiftConfig()
    options = [
        f"{RS}.{key}"
        for key in valid_keys(ResourceShiftConfig)
        if isinstance(functools.reduce(getattr, key.split("."), defaults), float)
    ]
    assert f"{RS}.planner.margin" in options
    config, invocation = composed(GROUP, *(f"{option}={value}" for option in options))
    findings = complete(config, invocation)
    assert [finding.option for finding in findings] == options
    assert {finding.problem for finding in findings} == {"must be a finite number"}


def test_leftovers_that_say_the_same_are_fine() -> None:
    completed(GROUP, f"{RS}.train.{MINI}=2", f"{ASYNC}.parameter_sync_step=2")
    completed(GROUP, f"{RS}.staleness=1", f"{ASYNC}.num_warmup_batches=1")


def test_leftover_of_a_configuration_built_by_hand_is_told_by_its_value() -> None:
    config, _ = composed(GROUP, f"{ASYNC}.parameter_sync_step=2")
    assert [finding.option for finding in complete(config)] == [f"{ASYNC}.parameter_sync_step"]


def test_own_value_equal_to_the_derived_one_is_fine() -> None:
    completed(GROUP, f"{RS}.staleness=3", "trainer.v1.sampler.max_off_policy_threshold=4")


def test_nothing_happens_when_off() -> None:
    plain, invocation = composed()
    assert not is_requested(plain, invocation)
    config, invocation = composed(f"+{RS}.enable=false", "trainer.v1.trainer_mode=separate_async")
    before = to_plain(config)
    assert complete(config, invocation) == []
    assert to_plain(config) == before


def test_typed_node_of_a_completed_configuration() -> None:
    typed = resource_shift_config(completed(GROUP, f"{RS}.planner.margin=0.2"))
    assert isinstance(typed, ResourceShiftConfig)
    assert (typed.enable, typed.planner.margin) == (True, 0.2)


def test_option_names_are_frozen() -> None:
    """A renamed option breaks users' scripts: change this list on purpose only."""
    leaves = [key for key in valid_keys(ResourceShiftConfig) if "." in key]
    assert leaves == [
        "slots.gpus_per_slot",
        "slots.cpu_share",
        "planner.name",
        "planner.interval_s",
        "planner.window_s",
        "planner.margin",
        "planner.cooldown_s",
        "planner.immunity_s",
        "planner.rollout_floor",
        "planner.genrm_floor",
        "shift.drain_s",
        "shift.sleep_s",
        "shift.load_s",
        "shift.wake_s",
        "shift.restart_failed",
        "shift.restart_s",
        "store.directory",
        "store.keep_versions",
        "store.reserve_bytes",
        "store.shard_bytes",
        "judge.queue_deadline_s",
        "judge.request_deadline_s",
        "train.mini_batches_per_step",
        "train.poll_interval_s",
        "train.lease_deadline_s",
        "engine.host",
        "engine.kv_cache_bytes",
        "engine.stats_interval_s",
        "observe.directory",
        "observe.timeline_png",
        "observe.perfetto_trace",
    ]
