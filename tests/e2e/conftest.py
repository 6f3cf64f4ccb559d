"""Fixtures of the tests that start whole training runs: minutes each, so every run proves several things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.launch import Run
from e2e.toy_task import Assets, make_assets


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("e2e-assets"))


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs (arguments as of ``Run``) in the test's own folder and leaves nothing of them on the machine."""
    runs: list[Run] = []

    def start(overrides: dict[str, Any], **arguments: Any) -> Run:
        runs.append(Run(tmp_path, overrides, **arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
