"""Sampling parameters that spare an engine's front end work whose result nobody reads."""

from __future__ import annotations

from typing import Any


def for_token_ids(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """``sampling_params`` for a caller that reads the response's token ids and logprobs, and no text.

    vLLM's front end would turn every token and every logprob's token into text, which is much of its CPU time.
    Requests with stop strings need the text and stay as they are; what the caller set itself wins. Called for each
    request in the process of the front end; returns a new dict.

    The caller is still woken for every token: verl counts a request as admitted at its first output, which
    ``FINAL_ONLY`` would withhold, and ``stream_interval`` has no effect on cumulative outputs
    (vllm/v1/engine/output_processor.py, ``sent_tokens_offset``).
    """
    return dict(sampling_params) if sampling_params.get("stop") else {"detokenize": False, **sampling_params}
