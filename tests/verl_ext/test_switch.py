"""The wrapper around ``validate_config``, on a stand-in for ``verl.utils.config``: no verl is imported here."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_pivot.cli.doctor import compose_verl_config
from verl_pivot.config.completion import Invocation
from verl_pivot.verl_ext import switch, versions

GROUP = "+resource_shift@_global_=pivot"


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return compose_verl_config([GROUP, "+pivot_platform@_global_=cpu"], "ppo_trainer")[0]


@pytest.fixture(scope="module")
def composed_off() -> DictConfig:
    return compose_verl_config([], "ppo_trainer")[0]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "data.parquet").touch()
    return str(tmp_path)


@pytest.fixture
def config(composed: DictConfig, model: str, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """A configuration that only warns (there is no judge)."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    config = copy.deepcopy(composed)
    OmegaConf.update(config, "actor_rollout_ref.model.path", model)
    for option in ("data.train_files", "data.val_files"):
        OmegaConf.update(config, option, f"{model}/data.parquet")
    OmegaConf.update(config, "data.train_batch_size", 256)
    return config


@pytest.fixture
def verl_config(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a ``validate_config`` that notes its calls, in the place of verl's."""
    module = ModuleType("verl.utils.config")
    calls: list[tuple[Any, ...]] = []
    module.calls = calls  # type: ignore[attr-defined]
    module.validate_config = lambda config, use_reference_policy, use_critic: calls.append(  # type: ignore[attr-defined]
        (config, use_reference_policy, use_critic)
    )
    for name, stand_in in (("verl", ModuleType("verl")), ("verl.utils", ModuleType("verl.utils"))):
        monkeypatch.setitem(sys.modules, name, stand_in)
    sys.modules["verl"].utils = sys.modules["verl.utils"]  # type: ignore[attr-defined]
    sys.modules["verl.utils"].config = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.utils.config", module)
    return module


def test_configuration_without_the_switch_passes_through_untouched(
    verl_config: ModuleType, composed_off: DictConfig
) -> None:
    switch.install({"trainer": "broken"})
    before = OmegaConf.to_yaml(composed_off)
    verl_config.validate_config(config=composed_off, use_reference_policy=False, use_critic=True)
    assert verl_config.calls == [(composed_off, False, True)]
    assert verl_config.calls[0][0] is composed_off
    assert OmegaConf.to_yaml(composed_off) == before


def test_configuration_is_completed_in_place_before_verl_validates_it(
    verl_config: ModuleType, config: DictConfig, caplog: pytest.LogCaptureFixture
) -> None:
    switch.install({})
    OmegaConf.update(config, "trainer.resource_shift.staleness", 1)
    with caplog.at_level(logging.WARNING):
        verl_config.validate_config(config, False, use_critic=False)
    assert verl_config.calls[0][0] is config
    assert config.trainer.v1.sampler.max_off_policy_threshold == 2
    assert "reward.reward_model.enable=False" in caplog.text


def test_installing_twice_wraps_once(verl_config: ModuleType) -> None:
    switch.install({})
    wrapped = verl_config.validate_config
    switch.install({})
    assert verl_config.validate_config is wrapped


def test_every_error_is_in_the_one_message(verl_config: ModuleType, config: DictConfig) -> None:
    switch.install({"trainer": "ImportError: no module named x"})
    OmegaConf.update(config, "data.train_batch_size", 10)
    OmegaConf.update(config, "trainer.use_v1", False)
    with pytest.raises(SystemExit) as refused:
        verl_config.validate_config(config, False, False)
    message = str(refused.value)
    assert "refuses this configuration (3 errors)" in message
    for part in ("data.train_batch_size=10", "trainer.use_v1=False", "plugin part 'trainer'", "no module named x"):
        assert part in message
    assert verl_config.calls == []


@pytest.mark.parametrize("installed", ["0.9.0", "0.9.2", "0.10.0.dev0", None])
def test_another_verl_is_refused_by_name(
    installed: str | None, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_verl", lambda: installed)
    with pytest.raises(SystemExit, match=r"pip install verl==0\.9\.1") as refused:
        switch.check_before_ray(config, {}, Invocation())
    assert str(installed) in str(refused.value) or installed is None


def test_versions_do_not_matter_while_off(composed_off: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_verl", lambda: "0.1")
    switch.check_before_ray(composed_off, {}, Invocation())
    off = copy.deepcopy(composed_off)
    OmegaConf.update(off, "trainer.resource_shift", {"enable": False}, force_add=True)
    switch.check_before_ray(off, {}, Invocation())
