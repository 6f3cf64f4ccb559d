"""What the trainer says when the control plane does not answer; with real Ray actors in its place."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("verl")

from verl_pivot.vllm_ext import distribution  # noqa: E402

distribution.install()

from verl_pivot.verl_ext import deployment as deployment_module  # noqa: E402
from verl_pivot.verl_ext.deployment import Deployment  # noqa: E402

pytestmark = pytest.mark.contract


@pytest.fixture
def deployment(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    class Plane:  # a local class travels by value: Ray's processes do not import this file
        def __init__(self) -> None:
            self.why: str | None = None

        def hopeless(self) -> str | None:
            return self.why

        def lose_hope(self, why: str) -> None:
            self.why = why

        def whereabouts(self) -> str:
            return "slot 0 is loading"

        def metrics(self) -> dict[str, float]:
            time.sleep(3600)
            return {}

        def acquire_train(self, ready: int, needed: int) -> float:
            time.sleep(0.6)
            return 0.6

    monkeypatch.setattr(deployment_module, "ANSWER_TIMEOUT_S", 2.0)
    monkeypatch.setattr(deployment_module, "WORD_INTERVAL_S", 0.2)
    made = Deployment.__new__(Deployment)
    made.control_plane = ray.remote(Plane).options(num_cpus=0, max_concurrency=8).remote()
    ray.get(made.control_plane.hopeless.remote())
    return made


def test_a_control_plane_that_hangs_is_named(deployment: Deployment) -> None:
    with pytest.raises(
        RuntimeError, match=r"the control plane hangs \(metrics: no answer for 2 s\); resume from the last"
    ):
        deployment.metrics()


def test_a_control_plane_that_is_gone_is_named(deployment: Deployment) -> None:
    ray.kill(deployment.control_plane)
    with pytest.raises(RuntimeError, match="the control plane is gone; resume from the last checkpoint"):
        deployment.acquire_train(1, 1)


def test_a_long_wait_says_what_it_waits_for(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert deployment.acquire_train(16, 16) == 0.6
    assert "training waits for its slots since" in caplog.text and "slot 0 is loading" in caplog.text


def test_a_wait_in_vain_ends(deployment: Deployment) -> None:
    ray.get(deployment.control_plane.lose_hope.remote("no slot is left that could serve genrm"))
    with pytest.raises(RuntimeError, match="no slot is left that could serve genrm"):
        deployment._await(deployment.control_plane.metrics.remote(), "waiting")


def test_quiet_is_explained(
    deployment: Deployment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"_checked_s": 0.0, "_progress": (15, 16), "_quiet_since_s": time.monotonic()}
    vars(deployment).update(state)
    with caplog.at_level(logging.WARNING):
        deployment.check()
    assert not caplog.records, "it has been quiet for no time"
    vars(deployment).update({**state, "_quiet_since_s": time.monotonic() - 61.0})
    with caplog.at_level(logging.WARNING):
        deployment.check()
    assert "no group became ready for 60 s (15 of 16 are); slot 0 is loading" in caplog.text
