"""Two runs at once on one machine, and verl as it is without the switch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.accounts import assert_adds_up
from e2e.launch import Run
from e2e.toy_task import Assets, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_two_runs(start_run: Callable[..., Run], assets: Assets) -> None:
    settings = overrides(assets, rollout_slots=0)
    first = start_run(settings, name="first")
    second = start_run(settings, name="second", store=first.store)
    for run in (first, second):
        assert_adds_up(run, run.finish(deadline_s=1800), steps=[1, 2, 3], prompts=4, n=4)
    second.assert_gone()


MEASURED = ("timing", "perf/")
"""Parts of the names of metrics that no two runs have in common."""


def test_flag_off(start_run: Callable[..., Run], assets: Assets) -> None:
    """With the plugin installed and the switch off, verl has the same configuration and the same first step as with
    nothing of it loaded but what any run on a CPU needs."""
    settings = {
        option: value
        for option, value in overrides(assets, rollout_slots=0, genrm_slots=0).items()
        if not option.startswith(("trainer.resource_shift", "reward."))
    }
    settings |= {
        "reward.custom_reward_function.path": Path(__file__).with_name("plain_reward.py"),
        "actor_rollout_ref.rollout.n_gpus_per_node": None,
        "trainer.total_training_steps": 1,
        # Which sequences share a batch, and with it who gets which random number, depends on timing: no random numbers.
        "actor_rollout_ref.rollout.top_k": 1,
        "actor_rollout_ref.rollout.n": 1,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    }
    switch = ("+pivot_platform@_global_=cpu",)
    here = str(Path(__file__).parent.parent)
    without = {
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": "e2e.cpu_support_only",
        "PYTHONPATH": here,
    }
    results = []
    for name, environ in (("installed", {}), ("left-out", without)):
        run = start_run(settings, name=name, switch=switch, environ=environ)
        assert run.wait_end(deadline_s=1200) == 0, run.tail()
        results.append((_config(run), _comparable(run.metrics()[1]), [r["output"] for r in run.trained()[1]]))
    (config, metrics, outputs), (other_config, other_metrics, other_outputs) = results
    assert config == other_config
    assert sorted(outputs) == sorted(other_outputs)
    assert metrics == pytest.approx(other_metrics, rel=1e-3, abs=1e-5)
    assert metrics["actor/grad_norm"] > 0


LOGGED = re.compile(r"\s*((DEBUG|INFO|WARNING|ERROR):|/\S+\.py:\d+: \w+Warning|warnings\.warn\()")


def _config(run: Run) -> str:
    """The whole configuration as verl prints it, without white space (Ray breaks lines where it likes) and without
    what names the run."""
    lines = re.findall(r"\(TaskRunnerV1 pid=\d+\)(?:\x1b\[0m)?(.*)", run.log())
    # What the process logs goes to another stream, which Ray may put between two lines of the configuration.
    printed = re.sub(r"\s", "", "".join(line for line in lines if not LOGGED.match(line)))
    start = printed.index("{'actor_rollout_ref'")
    config = printed[start : printed.index("'transfer_queue'", start)]
    assert len(config) > 10_000
    for name in (str(run.folder), str(run.ray_dir), run.name):
        config = config.replace(name, "")
    return config


def _comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    """What is measured aside; numbers that are none in both runs (verl's logger writes null for them) are alike."""
    return {
        key: -1.0 if value is None else value
        for key, value in metrics.items()
        if not any(part in key for part in MEASURED)
    }
