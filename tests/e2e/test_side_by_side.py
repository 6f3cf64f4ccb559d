"""Two runs at once on one machine, and verl as it is without the switch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.accounts import assert_adds_up
from e2e.launch import Run
from e2e.toy_task import Assets, overrides

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_two_runs(start_run: Callable[..., Run], assets: Assets) -> None:
    settings = {**overrides(assets, rollout_slots=0), "trainer.resource_shift.slots.cpu_share": 0.5}
    first = start_run(settings, name="first")
    second = start_run(settings, name="second", store=first.store)
    for run in (first, second):
        assert_adds_up(run, run.finish(deadline_s=1800), steps=[1, 2, 3], prompts=4, n=4)
    second.assert_gone()


NOT_ALIKE = ("timing", "perf/", "_s/", "memory", "mfu", "throughput")


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
    }
    switch = ("+pivot_platform@_global_=cpu",)
    here = str(Path(__file__).parent.parent)
    without = {
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": "e2e.cpu_support_only",
        "PYTHONPATH": here,
    }
    results = []
    for name, environ in (("installed", {}), ("without", without)):
        run = start_run(settings, name=name, switch=switch, environ=environ)
        assert run.wait_end(deadline_s=1200) == 0, run.tail()
        results.append((_config(run), _comparable(run.metrics()[1])))
    assert results[0] == results[1]


def _config(run: Run) -> str:
    """The configuration as verl prints it, without what names the run."""
    start = run.log().index("ray init kwargs")
    return run.log()[start:].split("\n")[0].replace(str(run._ray), "")


def _comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not any(part in key for part in NOT_ALIKE)}
