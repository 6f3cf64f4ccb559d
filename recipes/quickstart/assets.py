"""Makes the policy, the judge and the prompts of the quick start, and measures what they can do."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipes.quickstart import task
from recipes.quickstart.model import Example, TrainingPlan, build_model, sample, train
from recipes.quickstart.tokenizer import build_tokenizer, chat_ids, reply_ids

JUDGE_REPLY_TOKENS = 128
COMPARISON_SHARE = 0.6
"""Share of the judge's lessons that only compare two numbers; they are short, a third of all tokens."""
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the steps done and the steps in all."""


@dataclass(frozen=True)
class Settings:
    """Everything that the assets depend on besides the code."""

    seed: int = 0
    train_prompts: int = 1024
    val_prompts: int = 64
    effort: float = 1.0
    """Factor on all training steps and measured samples; less than 1 only to see the machinery work."""

    def digest(self) -> str:
        """Changes with any setting and with the code beside this file that makes the assets."""
        text = json.dumps(asdict(self), sort_keys=True)
        for name in ("assets.py", "model.py", "task.py", "tokenizer.py"):
            text += Path(__file__).with_name(name).read_text(encoding="utf-8")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def scaled(self, count: int) -> int:
        return max(2, round(count * self.effort))


def already_made(out: Path, settings: Settings) -> bool:
    meta = out / "meta.json"
    return meta.exists() and json.loads(meta.read_text(encoding="utf-8")).get("digest") == settings.digest()


def make_assets(out: Path, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Fill ``out`` with ``policy/``, ``judge/``, ``train.parquet``, ``val.parquet`` and, last, ``meta.json``.

    One model first learns to add; the policy and the judge are both trained on from it. Returns what meta.json holds.
    """
    for name in ("policy", "judge"):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "meta.json").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = build_tokenizer()
    rng = random.Random(settings.seed)
    torch.manual_seed(settings.seed)
    model = build_model(tokenizer, settings.seed)
    parameters = sum(p.numel() for p in model.parameters())

    def learn(stage: str, draw: Callable[[], Example], plan: TrainingPlan) -> None:
        done = iter(range(1, plan.steps + 1))
        train(model, draw, plan, rng, lambda loss: progress(stage, next(done), plan.steps))

    learn("learning to add", lambda: _solved(tokenizer, rng), TrainingPlan(settings.scaled(600), 0.01, 3e-3))
    adder = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    learn("policy", lambda: _answered(tokenizer, rng), TrainingPlan(settings.scaled(300), 0.006, 1e-3))
    _save(model, tokenizer, out / "policy")
    progress("sampling the policy", 0, 1)
    samples = _policy_samples(model, tokenizer, rng, settings.scaled(512))
    progress("sampling the policy", 1, 1)

    model.load_state_dict(adder)
    learn("judge", lambda: _judged(tokenizer, rng), TrainingPlan(settings.scaled(800), 0.01, 2e-3))
    _save(model, tokenizer, out / "judge")
    made_up = _made_up(rng, settings.scaled(256))
    progress("measuring the judge", 0, 1)
    judge_measures = _judge_measures(model, tokenizer, samples, made_up)
    progress("measuring the judge", 1, 1)

    _write_prompts(out, settings)
    meta = {
        "digest": settings.digest(),
        "settings": asdict(settings),
        "parameters": parameters,
        "policy": _policy_measures(samples),
        "judge": judge_measures,
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta


def _solved(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    problem = task.draw_problem(rng, lesson=True)
    return Example(chat_ids(tokenizer, problem.question), reply_ids(tokenizer, task.worked_response(problem, rng)))


def _answered(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    problem = task.draw_problem(rng)
    return Example(chat_ids(tokenizer, problem.question), reply_ids(tokenizer, task.draw_response(problem, rng)))


def _judged(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    if rng.random() < COMPARISON_SHARE:
        start, rest = task.draw_comparison(rng)
        return Example(tokenizer.encode(start, add_special_tokens=False), reply_ids(tokenizer, rest))
    problem = task.draw_problem(rng)
    response = task.draw_candidate(problem, rng)
    prompt = chat_ids(tokenizer, task.judge_prompt(problem, response))
    reply = task.judge_reply(problem, response)
    return Example(prompt, reply_ids(tokenizer, reply), decisive=reply.rindex("claim"))


Candidate = tuple[task.Problem, str]


def _policy_samples(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, count: int
) -> list[Candidate]:
    problems = [task.draw_problem(rng) for _ in range(count)]
    prompts = [chat_ids(tokenizer, problem.question) for problem in problems]
    return list(zip(problems, sample(model, tokenizer, prompts, task.MAX_RESPONSE_TOKENS, 1.0), strict=True))


def _made_up(rng: random.Random, count: int) -> list[Candidate]:
    problems = [task.draw_problem(rng) for _ in range(count)]
    return [(problem, task.draw_candidate(problem, rng)) for problem in problems]


def _policy_measures(samples: list[Candidate]) -> dict[str, float]:
    """Accuracy at temperature 1, and lengths in tokens (without the end token)."""
    lengths = sorted(len(response) for _, response in samples)
    return {
        "samples": len(samples),
        "accuracy": _mean([task.is_correct(*sample) for sample in samples]),
        "worked_share": _mean([response.startswith("work") for _, response in samples]),
        "truncated_share": _mean([length >= task.MAX_RESPONSE_TOKENS for length in lengths]),
        "response_tokens_mean": _mean(lengths),
        "response_tokens_p50": lengths[len(lengths) // 2],
        "response_tokens_p90": lengths[len(lengths) * 9 // 10],
        "response_tokens_max": lengths[-1],
    }


def _judge_measures(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, samples: list[Candidate], made_up: list[Candidate]
) -> dict[str, float]:
    """How often greedy verdicts agree with the truth: on the policy's samples, and on made-up responses."""
    candidates = samples + made_up
    prompts = [chat_ids(tokenizer, task.judge_prompt(*candidate)) for candidate in candidates]
    replies = sample(model, tokenizer, prompts, JUDGE_REPLY_TOKENS, 0.0)
    right = [task.is_correct(*candidate) for candidate in candidates]
    agrees = [
        reply.endswith(f"verdict: {'yes' if truth else 'no'}") for reply, truth in zip(replies, right, strict=True)
    ]
    count = len(samples)
    return {
        "agreement": _mean(agrees[:count]),
        "agreement_on_right": _mean([a for a, truth in zip(agrees[:count], right[:count], strict=True) if truth]),
        "agreement_on_wrong": _mean([a for a, truth in zip(agrees[:count], right[:count], strict=True) if not truth]),
        "agreement_on_made_up": _mean(agrees[count:]),
        "reply_tokens_mean": _mean([len(reply) for reply in replies[:count]]),
        "reply_tokens_max": max(len(reply) for reply in replies),
    }


def _mean(values: list[Any]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write_prompts(out: Path, settings: Settings) -> None:
    """Prompts in verl's format. Validation questions do not occur in training."""
    rng = random.Random(settings.seed + 1)
    val = [task.draw_problem(rng) for _ in range(settings.val_prompts)]
    held_out, training = set(val), []
    while len(training) < settings.train_prompts:
        problem = task.draw_problem(rng)
        if problem not in held_out:
            training.append(problem)
    for split, problems in (("train", training), ("val", val)):
        rows = [prompt_row(problem, split, index) for index, problem in enumerate(problems)]
        pd.DataFrame(rows).to_parquet(out / f"{split}.parquet")


def prompt_row(problem: task.Problem, split: str, index: int) -> dict[str, Any]:
    """One row as verl's dataset reads it."""
    return {
        "data_source": "verl_pivot/quickstart",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "model", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "question": problem.question},
    }
