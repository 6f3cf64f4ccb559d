"""The small Qwen3 model, its supervised training and sampling from it, in plain torch on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Example:
    """A prompt and the reply to learn, as token ids."""

    prompt: list[int]
    reply: list[int]
    decisive: int | None = None
    """Index in the reply from which on tokens are few but matter: their loss weighs five times as much."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.reply)

    def weights(self, width: int) -> list[float]:
        """Loss weight of each token of the padded row: prompt and padding have none."""
        plain = len(self.reply) if self.decisive is None else self.decisive
        reply = [1.0] * plain + [5.0] * (len(self.reply) - plain)
        return [0.0] * len(self.prompt) + reply + [0.0] * (width - len(self))


@dataclass(frozen=True)
class TrainingPlan:
    """One supervised run: how long, how large a step."""

    steps: int
    matrix_lr: float
    """Muon, for the matrices inside the layers."""
    other_lr: float
    """AdamW, for embeddings, the output layer and norms."""
    batch_tokens: int = 1500


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A random model of about a third of a million parameters, in fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def batches(draw: Callable[[], Example], rng: random.Random, batch_tokens: int) -> Iterator[list[Example]]:
    """Endless batches of ``batch_tokens`` tokens, padding included, from examples of about equal length."""
    while True:
        pool = [draw() for _ in range(512)]
        pool.sort(key=lambda example: len(example) * rng.uniform(0.85, 1.15))
        groups: list[list[Example]] = [[]]
        longest = 0
        for example in pool:
            longest = max(longest, len(example))
            if longest * (len(groups[-1]) + 1) > batch_tokens and groups[-1]:
                groups.append([])
                longest = len(example)
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from groups


def train(
    model: Qwen3ForCausalLM,
    draw: Callable[[], Example],
    plan: TrainingPlan,
    rng: random.Random,
    on_step: Callable[[float], None],
) -> None:
    """Teach ``model`` the replies that ``draw`` gives; calls ``on_step(loss)`` after each step."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=plan.matrix_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warmup_then_linear(step, plan.steps))
        for optimizer in optimizers
    ]
    model.train()
    stream = batches(draw, rng, plan.batch_tokens)
    for _ in range(plan.steps):
        loss = _loss(model, next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        on_step(loss.item())
    model.eval()


def _loss(model: Qwen3ForCausalLM, examples: list[Example]) -> torch.Tensor:
    """Weighted mean cross-entropy of the reply tokens. Padding is on the right, where causal attention never looks."""
    width = max(map(len, examples))
    rows = torch.tensor([e.prompt + e.reply + [model.config.pad_token_id] * (width - len(e)) for e in examples])
    weights = torch.tensor([e.weights(width) for e in examples])[:, 1:].flatten()
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum()


def _warmup_then_linear(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 20) * (1 - step / steps)


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    batch_size: int = 128,
) -> list[str]:
    """One reply to each prompt (token ids), in order; ``temperature`` 0 is greedy. Draws from torch's global seed."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    replies = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(prompts[i]) for i in chosen)
        pads = [width - len(prompts[i]) for i in chosen]
        ids = torch.tensor([[tokenizer.pad_token_id] * n + prompts[i] for n, i in zip(pads, chosen, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **how)
        texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        for index, text in zip(chosen, texts, strict=True):
            replies[index] = text
    return replies
