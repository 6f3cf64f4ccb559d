"""What was learned of lengths, beside a checkpoint: read back whole, and a warning by name when it is not there."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_pivot.vllm_ext import distribution

distribution.install()

from verl_pivot.config.schema import ResourceShiftConfig  # noqa: E402
from verl_pivot.core.snapshot import Role  # noqa: E402
from verl_pivot.runtime.lengths import LengthOptions, LengthWatch  # noqa: E402
from verl_pivot.verl_ext import deployment as deployment_module  # noqa: E402
from verl_pivot.verl_ext import length_file  # noqa: E402
from verl_pivot.verl_ext.control_plane import ControlPlane  # noqa: E402
from verl_pivot.verl_ext.deployment import Deployment  # noqa: E402


def watch() -> LengthWatch:
    each = {Role.ROLLOUT: 100, Role.GENRM: 100}
    return LengthWatch(LengthOptions(max_tokens=each, batch_limits=each, responses_per_prompt=4))


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A deployment whose control plane answers in this process."""
    plane = ControlPlane.__new__(ControlPlane)
    plane._lengths = watch()

    def remote(method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.run(getattr(ControlPlane, method)(plane, *args)))

    made = Deployment.__new__(Deployment)
    made._shift = ResourceShiftConfig()
    made._shift.planner.name = "lookahead"
    made.control_plane = SimpleNamespace(**{method: remote(method) for method in ("length_state", "load_length_state")})  # type: ignore[assignment]
    monkeypatch.setattr(deployment_module, "_answer", lambda answer, what: answer)
    return made


def test_what_was_learned_comes_back(deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deployment.save_lengths(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [length_file.NAME]
    with caplog.at_level(logging.WARNING):
        deployment.load_lengths(tmp_path)
    assert not caplog.messages


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", '{"rollout": {}}', b"\xff\xfe"])
def test_a_file_that_is_missing_or_broken_is_a_warning(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | bytes | None
) -> None:
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / length_file.NAME).write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        deployment.load_lengths(tmp_path)
    (message,) = caplog.messages
    assert str(tmp_path / length_file.NAME) in message
    assert "learned anew" in message


def test_a_run_that_predicts_nothing_neither_writes_nor_asks(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment._shift.planner.name = "harmonic"
    deployment.control_plane.length_state = SimpleNamespace(remote=lambda: None)  # type: ignore[attr-defined]
    deployment.save_lengths(tmp_path)
    deployment.load_lengths(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not caplog.messages


def test_a_checkpoint_folder_that_cannot_be_written_to_is_a_warning(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.save_lengths(tmp_path / "gone")
    assert "was not written" in caplog.text
