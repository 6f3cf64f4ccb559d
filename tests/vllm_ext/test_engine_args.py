"""What a CPU engine that sleeps is not started with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verl_pivot.vllm_ext.engine_args import require_supported

PLAIN = {"quantization": None, "enforce_eager": True, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def configuration(lora: object = None, speculative: object = None, **changes: Any) -> Any:
    """The parts of a ``VllmConfig`` that are looked at."""
    options = SimpleNamespace(**{**PLAIN, **changes})
    return SimpleNamespace(
        model_config=options, parallel_config=options, lora_config=lora, speculative_config=speculative
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization": "fp8"}, "quantization=fp8"),
        ({"lora": object()}, "enable_lora=True"),
        ({"speculative": object()}, "speculative_config=True"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4"),
        ({"enforce_eager": False}, "enforce_eager=False"),
    ],
    ids=lambda value: value.partition("=")[0] if isinstance(value, str) else "",
)
def test_refuses_what_it_cannot_reload(changes: dict[str, Any], named: str) -> None:
    require_supported(configuration())
    with pytest.raises(ValueError, match=f"^{named} does not work with SleepingCPUWorker"):
        require_supported(configuration(**changes))
