"""Tiny Qwen3 checkpoints with a 128-token character tokenizer, for tests that run real engines.

``model_dir`` writes a model once a test session. Import-light: torch and transformers are imported when a model is
built. The tokenizer has exactly ``vocab_size`` tokens, because verl masks logits beyond ``len(tokenizer)``.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 128
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<unk>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """Shape of one model; ``experts=0`` means dense."""

    experts: int = 0
    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    moe_intermediate: int = 64
    tied: bool = False
    dtype: str = "float32"
    weight_scale: float = 4.0
    """Factor on the initial weights, so that the distribution is far from uniform and errors show."""

    @property
    def name(self) -> str:
        kind = f"moe{self.experts}x{self.moe_intermediate}" if self.experts else "dense"
        return f"{kind}-{self.layers}x{self.hidden}x{self.intermediate}-{'tied-' if self.tied else ''}{self.dtype}"


DENSE = TinyModel()
DENSE_TIED = TinyModel(tied=True)
MOE = TinyModel(experts=8)
MOE_PADDED = TinyModel(experts=8, moe_intermediate=48)
"""vLLM pads expert widths that are not multiples of 32."""
DENSE_300MB = TinyModel(layers=7, hidden=1024, intermediate=3072)
"""About 300 MB in fp32."""


@functools.cache
def _session_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def model_dir(shape: TinyModel, seed: int = 1) -> str:
    """Directory of ``shape`` with weights drawn from ``seed``; written at the first call, removed at exit."""
    return build(_session_root(), shape, seed)


def build(root: Path, shape: TinyModel, seed: int) -> str:
    """Write ``shape`` with weights drawn from ``seed`` under ``root``, unless it is there, and return its directory."""
    path = root / f"{shape.name}-seed{seed}"
    if not (path / "config.json").exists():
        _model(shape, seed).save_pretrained(path)
        tokenizer().save_pretrained(path)
    return str(path)


def _model(shape: TinyModel, seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(shape), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(shape.weight_scale)
    return model.to(getattr(torch, shape.dtype))


def _config(shape: TinyModel) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    heads = max(4, shape.hidden // 64)
    common = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=shape.tied,
    )
    if not shape.experts:
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        **common,
        num_experts=shape.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=shape.moe_intermediate,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )


def tokenizer() -> Any:
    """One token a character; unknown characters become <unk>. Has a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = list("0123456789+-*/=().,?!: \n") + list(string.ascii_letters)
    tokens = [*_SPECIAL, *characters]
    tokens += [f"<f{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
