"""Lines of verl and vLLM that this package cites, ``verl/...py:12``, are what they are cited for."""

from __future__ import annotations

import re

import pytest
from upstream_source import lines, package_dir

from verl_pivot.vllm_ext.versions import CPU_DISTRIBUTION, SUPPORTED, installed_version

pytestmark = pytest.mark.contract

# A path may be cited for several lines (12,34) or for a range (12-34).
CITATION = re.compile(r"[\w./-]*\w\.py:\d+(?:[,-]\d+)*")

WORDS = {
    "verl/experimental/reward_loop/reward_loop.py:320": "enable_resource_pool",
    "verl/experimental/reward_loop/router/naive_router.py:83": "class NaiveRouter",
    "verl/experimental/separation/engine_workers.py:137": "self.copy_handler(",
    "verl/single_controller/ray/base.py:230": '"NPU"',
    "verl/third_party/vllm/__init__.py:31": "get_version(",
    "verl/trainer/ppo/v1/trainer_base.py:347": "RewardLoopManager(",
    "verl/trainer/ppo/v1/trainer_base.py:378": "LLMServerManager.create_empty(",
    "verl/trainer/ppo/v1/trainer_base.py:953": 'f"global_step_{self.global_steps}"',
    "verl/trainer/ppo/v1/trainer_separate_async.py:187": "def _compute_old_log_prob",
    "verl/utils/distributed.py:89": "cpu:gloo",
    "verl/utils/fsdp_utils.py:1180": ".detach().cpu()",
    "verl/utils/model.py:649": "flash_attention_2",
    "verl/workers/engine/fsdp/transformer_impl.py:730,935": "get_device_id()",
    "verl/workers/engine/fsdp/transformer_impl.py:1143,1594": "@EngineRegistry.register(",
    "verl/workers/engine/utils.py:125": "micro_batch_size_per_gpu",
    "verl/workers/rollout/llm_server.py:171": "class FullyAsyncLLMServerClient",
    "verl/workers/rollout/llm_server.py:354": "class LLMServerManager",
    "verl/workers/rollout/llm_server.py:409": "def create_empty",
    "verl/workers/rollout/router.py:32": "class RequestLoadBalancer",
    "verl/workers/rollout/vllm_rollout/vllm_async_server.py:87": "class vLLMHttpServer",
    "verl/workers/rollout/vllm_rollout/vllm_async_server.py:349": "**engine_kwargs",
    "verl/workers/rollout/vllm_rollout/vllm_async_server.py:1348": "get_accelerator_ids()",
    "vllm/config/model.py:596": "Sleep mode is not supported",
    "vllm/model_executor/layers/fused_moe/experts/cpu_moe.py:312-331": "def _pad_moe_intermediate",
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:149": "is_weight_update",
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:149-172": "is_weight_update",
    "vllm/model_executor/layers/linear.py:202": "dispatch_cpu_unquantized_gemm(",
    "vllm/model_executor/layers/utils.py:345,362": "layer.cpu_linear =",
    "vllm/model_executor/layers/utils.py:348,363": "if remove_weight",
    "vllm/platforms/__init__.py:18": "def vllm_version_matches_substr",
    "vllm/platforms/cpu.py:169": "kv_cache_memory_bytes",
    "vllm/platforms/cpu.py:183": 'distributed_executor_backend = "mp"',
    "vllm/platforms/cpu.py:316": "LD_PRELOAD",
    "vllm/v1/engine/utils.py:139": "get_mp_context()",
    "vllm/v1/sample/ops/logprobs.py:10": "@torch.compile(",
    "vllm/v1/sample/ops/topk_topp_sampler.py:341": "@torch.compile(",
    "vllm/v1/worker/cpu_worker.py:192": "def sleep",
    "vllm/v1/worker/gpu_worker.py:470": "def reload_weights",
    "vllm/v1/worker/worker_base.py:272": "dir(worker_extension_cls)",
}
"""Citation -> a word of every line it names; of the first line where it names a range."""


def cited() -> dict[str, str]:
    """Citation -> a file of ours that has it."""
    root = package_dir("verl_pivot")
    return {
        citation: str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        for citation in CITATION.findall(path.read_text(encoding="utf-8"))
    }


def test_every_citation_is_a_full_path_with_an_entry() -> None:
    assert {citation: file for citation, file in cited().items() if citation not in WORDS} == {}


def test_every_entry_is_cited() -> None:
    assert WORDS.keys() - cited().keys() == set()


@pytest.mark.parametrize(("citation", "word"), WORDS.items(), ids=WORDS)
def test_cited_lines_say_what_they_are_cited_for(citation: str, word: str) -> None:
    if citation.startswith("vllm/") and not SUPPORTED[CPU_DISTRIBUTION].contains(installed_version() or "0"):
        pytest.skip("cites another vLLM")
    file, numbers = citation.split(":")
    source = lines(file)
    for number in re.sub(r"-\d+", "", numbers).split(","):
        assert word in source[int(number) - 1]


@pytest.mark.parametrize("text", ["see base.py:12, and", "(ray/../x-y/base.py:3,14)", "``a/__init__.py:5-7``"])
def test_half_a_path_is_a_citation_too(text: str) -> None:
    assert len(CITATION.findall(text)) == 1
