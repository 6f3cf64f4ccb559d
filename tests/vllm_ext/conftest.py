from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_helpers import make_llm, stop


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
