"""What all deployments work on: prompts, imposed lengths, and two tiny models of equal size."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.deployments.lengths import LengthScheme

MAX_PROMPT_TOKENS = 64
JUDGE_TEMPLATE_TOKENS = 96
"""More than the judge's prompt holds besides the response: question, words around it, chat template."""


@dataclass(frozen=True)
class Workload:
    """Sizes of the work. One step trains on ``prompts_per_step`` x ``responses_per_prompt`` responses."""

    prompts_per_step: int = 16
    responses_per_prompt: int = 8
    mini_batches_per_step: int = 4
    """Optimizer updates in a step, in every deployment."""
    micro_batch: int = 2
    """Sequences of one forward and backward pass; verl pads them to the longest on a CPU."""
    rollout: LengthScheme = field(default_factory=lambda: LengthScheme(60, 1.0, 1000, seed=1))
    judge: LengthScheme = field(default_factory=lambda: LengthScheme(40, 0.9, 400, seed=2))
    hidden: int = 192
    layers: int = 3
    intermediate: int = 384
    kv_cache_bytes: int = 128 * 1024 * 1024
    max_num_seqs: int = 64
    dataset_prompts: int = 512
    seed: int = 0

    @property
    def mini_batch_prompts(self) -> int:
        return self.prompts_per_step // self.mini_batches_per_step

    def expected_tokens(self, steps: int) -> dict[str, float]:
        """Mean tokens of a step over the first ``steps`` steps' prompts, as the schemes impose them."""
        response = judge = 0
        for index in range(steps * self.prompts_per_step):
            text = question(index, self.seed)
            for session in range(self.responses_per_prompt):
                tokens = self.rollout.tokens(text, session)
                response += tokens
                judge += self.judge.tokens(text, tokens)
        return {"response_tokens_per_step": response / steps, "judge_tokens_per_step": judge / steps}

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), **self.expected_tokens(8)}


@dataclass(frozen=True)
class Assets:
    """Where the workload's files are."""

    policy: Path
    judge: Path
    train_file: Path
    val_file: Path
    agent_config: Path


def question(index: int, seed: int) -> str:
    """Text of prompt ``index``; its number makes it unique, which the lengths depend on."""
    digits = random.Random(f"{seed}/{index}").choices(range(1, 10), k=6)
    return f"task {index}: {'+'.join(map(str, digits))}=?"


def make_assets(workload: Workload, root: Path) -> Assets:
    """Write models and prompts below ``root`` unless they are there; a few seconds. Imports torch and transformers."""
    key = hashlib.sha256(json.dumps(asdict(workload), sort_keys=True).encode()).hexdigest()[:12]
    folder = root / key
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, seed in (("policy", 1), ("judge", 2)):
            _write_model(workload, folder / name, seed)
        _write_prompts(workload, folder)
        _write_agent_config(workload, folder / "agent.yaml")
        (folder / "complete").touch()
    files = [folder / name for name in ("policy", "judge", "train.parquet", "val.parquet", "agent.yaml")]
    return Assets(*(path.resolve() for path in files))


def _write_model(workload: Workload, folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from recipes.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_prompts(workload: Workload, folder: Path) -> None:
    import pandas as pd

    def row(index: int) -> dict[str, Any]:
        return {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": question(index, workload.seed)}],
            "ability": "bench",
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {"index": index},
        }

    pd.DataFrame([row(i) for i in range(workload.dataset_prompts)]).to_parquet(folder / "train.parquet")
    pd.DataFrame([row(i) for i in range(8)]).to_parquet(folder / "val.parquet")


def _write_agent_config(workload: Workload, path: Path) -> None:
    target = "benchmarks.deployments.budget_agent.BudgetAgentLoop"
    # JSON is YAML, too
    path.write_text(json.dumps([{"name": "budget_agent", "_target_": target, "lengths": asdict(workload.rollout)}]))
