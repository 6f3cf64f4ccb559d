from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import make_llm, stop

from verl_pivot.vllm_ext import distribution, forkserver

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fork_engines() -> None:
    """Engines of this session are forked: half a second each instead of ten."""
    os.environ["PYTHONPATH"] = f"{_HERE}:{_HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
    distribution.install()
    forkserver.install(preload_extra=("engine_extensions",))


@pytest.fixture
def llm(fork_engines: None) -> Iterator[Callable[..., Any]]:
    """``make_llm`` whose engines end with the test."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(make_llm(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        stop(engine)
