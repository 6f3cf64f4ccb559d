"""Make and question real CPU engines."""

from __future__ import annotations

from typing import Any

from verl_pivot.vllm_ext.engine_args import cpu_engine_kwargs

MIB = 1 << 20
PROMPTS = [[6 + (i * 7 + j * 3) % 120 for j in range(20 + 3 * i)] for i in range(4)]


def make_llm(path: str, dtype: str = "float32", *, kv_cache_bytes: int = 32 * MIB, **overrides: Any) -> Any:
    from vllm import LLM

    return LLM(
        path, **{"dtype": dtype, "max_model_len": 256, "seed": 0, **cpu_engine_kwargs(kv_cache_bytes), **overrides}
    )


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def rpc(llm: Any, method: str, *args: Any) -> Any:
    return llm.collective_rpc(method, args=args)[0]


def engine_pid(llm: Any) -> int:
    return llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid


def logprobs(llm: Any, max_tokens: int = 4, **sampling: Any) -> list[float]:
    """Log probabilities of all prompt tokens but the first, then of the sampled ones, for each of PROMPTS.

    One request at a time and without prefix caching: the shape of the batch changes results in bf16.
    """
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(
        **{
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "prompt_logprobs": 0,
            "logprobs": 0,
            **sampling,
        }
    )
    found: list[float] = []
    for prompt in PROMPTS:
        request = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        output = request.outputs[0]
        found += [entry[token].logprob for token, entry in zip(prompt[1:], request.prompt_logprobs[1:], strict=True)]
        found += [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    return found


def hf_prompt_logprobs(path: str) -> list[list[float]]:
    """What transformers computes in fp32 for the prompt tokens: one list for each of PROMPTS."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for prompt in PROMPTS:
            scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            found.append(scores[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist())
    return found


def distance_to_hf(llm: Any, path: str) -> float:
    """Largest difference between the engine's prompt logprobs and those of transformers."""
    ours = logprobs(llm, max_tokens=1)
    reference = hf_prompt_logprobs(path)
    distance, start = 0.0, 0
    for scores in reference:
        distance = max(distance, *(abs(a - b) for a, b in zip(ours[start:], scores, strict=False)))
        start += len(scores) + 1
    return distance


def distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
