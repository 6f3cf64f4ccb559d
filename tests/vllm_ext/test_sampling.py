"""What the front end is spared, and which requests need it done."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from verl_pivot.vllm_ext import distribution

distribution.install()

from vllm import SamplingParams  # noqa: E402

from verl_pivot.vllm_ext.sampling import for_token_ids  # noqa: E402


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({}, False),
        ({"logprobs": 0, "temperature": 0.5}, False),
        ({"stop": []}, False),
        ({"stop": ["</answer>"]}, True),
        ({"stop": "</answer>"}, True),
        ({"detokenize": True}, True),
    ],
)
def test_text_is_made_only_where_it_is_needed(wanted: dict[str, Any], text: bool) -> None:
    before = dict(wanted)
    params = SamplingParams(**for_token_ids(wanted))
    assert params.detokenize is text
    assert wanted == before, "the caller's own dict changed"
    for name in wanted.keys() - {"stop", "detokenize"}:
        assert getattr(params, name) == wanted[name]
