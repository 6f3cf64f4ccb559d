from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # recipes are scripts of the repository, not part of the installed package

from recipes.quickstart import reward, task  # noqa: E402

PROBLEM = task.Problem((4, 5, 3))


def test_a_problem_reads_and_adds() -> None:
    assert (PROBLEM.question, PROBLEM.answer) == ("4+5+3=?", 12)


@pytest.mark.parametrize(
    ("terms", "chain"),
    [((4, 3), "7"), ((4, 5, 3), "9+3=12"), ((1, 2, 3, 4), "3+3+4=6+4=10")],
)
def test_addition_chain(terms: tuple[int, ...], chain: str) -> None:
    assert task.addition_chain(terms) == (chain, sum(terms))


@pytest.mark.parametrize(
    ("response", "claim"),
    [
        ("answer: 12", 12),
        ("work: 9+3=12\nanswer: 12", 12),
        ("work: 9+3=12\nanswer: 13", 13),
        ("answer: 12\nanswer: 13\n", 13),
        ("answer: 7", 7),
        ("answer: 120", None),
        ("work: 9+3=12", None),
        ("answer: ", None),
        ("answer: 12 or so", None),
        ("the answer: 12", None),
        ("answer: -12", None),
        ("answer: 4+5+3", None),
        ("answer: 12\nno idea", None),
        ("", None),
    ],
)
def test_claimed_answer_and_the_reward_function_read_alike(response: str, claim: int | None) -> None:
    assert task.claimed_answer(response) == claim
    for truth in (7, 12, 13):
        assert reward.is_right(response, str(truth)) == (claim == truth)


@pytest.mark.parametrize(
    ("response", "reply"),
    [
        ("work: 9+3=12\nanswer: 12", "work: 9+3=12\nclaim: 12\ncheck: 1/1 ok 2/2 ok\nverdict: yes"),
        ("work: 9+3=13\nanswer: 13", "work: 9+3=12\nclaim: 13\ncheck: 1/1 ok 2/3 no\nverdict: no"),
        ("answer: 2", "work: 9+3=12\nclaim: 2\ncheck: 1/0 no 2/2 ok\nverdict: no"),
        ("no idea", "work: 9+3=12\nclaim: none\nverdict: no"),
    ],
)
def test_a_faultless_judge(response: str, reply: str) -> None:
    assert task.judge_reply(PROBLEM, response) == reply


@given(st.integers())
@example(129279183)  # the same line of working, over and over
@settings(deadline=None)
def test_what_is_drawn_can_be_trained_on(seed: int) -> None:
    rng = random.Random(seed)
    problem = task.draw_problem(rng)
    assert problem.answer < 100
    assert task.is_correct(problem, task.worked_response(problem, rng))
    assert len(task.worked_response(problem, rng)) < task.MAX_RESPONSE_TOKENS
    assert len(task.draw_candidate(problem, rng)) <= task.MAX_RESPONSE_TOKENS
    assert len(task.judge_reply(problem, task.draw_response(problem, rng))) <= reward.JUDGE_REPLY_TOKENS


@given(st.integers())
@settings(deadline=None)
def test_comparisons_are_ends_of_judge_replies(seed: int) -> None:
    start, rest = task.draw_comparison(random.Random(seed))
    total, claim = start.split("\n")[:2]
    right = total.rpartition("=")[2].removeprefix("work: ") == claim.removeprefix("claim: ")
    assert rest.endswith(f"verdict: {'yes' if right else 'no'}")
    assert ("no " in rest or rest.endswith("no")) != right


def test_shares_of_right_answers() -> None:
    rng = random.Random(0)
    problems = [task.draw_problem(rng) for _ in range(4000)]
    policy = sum(task.is_correct(p, task.draw_response(p, rng)) for p in problems) / len(problems)
    judge = sum(task.is_correct(p, task.draw_candidate(p, rng)) for p in problems) / len(problems)
    assert 0.40 < policy < 0.60  # enough right ones to learn from, enough wrong ones to unlearn
    assert 0.40 < judge < 0.60  # a judge that always says the same must not look good


def test_responses_differ_much_in_length() -> None:
    rng = random.Random(0)
    lengths = sorted(len(task.draw_response(task.draw_problem(rng), rng)) for _ in range(4000))
    median, p95 = lengths[2000], lengths[3800]
    assert p95 > 2.5 * median


def test_the_reward_function_asks_as_the_judge_was_taught() -> None:
    assert reward.JUDGE_PROMPT == task.JUDGE_PROMPT


async def _ask_reward(verdict: str, response: str) -> dict[str, float]:
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    from verl_pivot.judge.sessions import close_session

    asked: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "judge"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    async with TestServer(app, host="127.0.0.1") as server:
        row = {"ground_truth": "12", "extra_info": {"question": PROBLEM.question}, "data_source": "toy"}
        router = f"127.0.0.1:{server.port}"
        result = await reward.compute_score(solution_str=response, reward_router_address=router, **row)
        await close_session()
    assert asked[0]["messages"][0]["content"] == task.judge_prompt(PROBLEM, response)
    return result


@pytest.mark.parametrize(
    ("verdict", "response", "score", "acc", "agrees"),
    [
        ("verdict: yes", "answer: 12", 1.0, 1.0, 1.0),
        ("verdict: no", "answer: 12", 0.0, 1.0, 0.0),
        ("verdict: yes", "answer: 13", 1.0, 0.0, 0.0),
        ("hm", "answer: 13", 0.0, 0.0, 1.0),
    ],
)
async def test_the_judge_gives_the_reward_and_the_truth_is_logged(
    verdict: str, response: str, score: float, acc: float, agrees: float
) -> None:
    result = await _ask_reward(verdict, response)
    assert (result["score"], result["acc"], result["judge_agrees"]) == (score, acc, agrees)
    assert result["judge_unparsed"] == float(verdict == "hm")
    assert all(isinstance(value, float) for value in result.values())  # verl averages every value


def test_the_reward_function_without_a_judge_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"reward\.reward_model\.enable"):
        asyncio.run(reward.compute_score("toy", "answer: 1", "1", {"question": "1=?"}))


@pytest.mark.engine
def test_prepare_makes_complete_assets_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes.quickstart.prepare import main

    arguments = [
        "--out",
        str(tmp_path),
        "--effort",
        "0.01",
        "--train-prompts",
        "40",
        "--val-prompts",
        "10",
        "--threads",
        "1",
    ]
    assert main(arguments) == 0
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["settings"]["effort"] == 0.01
    assert 0.0 <= meta["policy"]["accuracy"] <= 1.0
    assert 0.0 <= meta["judge"]["agreement"] <= 1.0

    weights = {}
    for name in ("policy", "judge"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert len(tokenizer) == model.config.vocab_size == 128
        assert model.dtype == torch.float32
        assert model.config.max_position_embeddings >= 2048
        assert (
            model.generation_config.eos_token_id
            == tokenizer.eos_token_id
            == tokenizer.convert_tokens_to_ids("<|im_end|>")
        )
        text = "work: 9+3=12\nanswer: 12"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
        chat = [{"role": "user", "content": "4+5+3=?"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert tokenizer.decode(ids) == "<|im_start|>user\n4+5+3=?<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.unk_token_id not in ids
        weights[name] = model.lm_head.weight
    assert not torch.equal(weights["policy"], weights["judge"])

    train, val = (pd.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "val"))
    assert (len(train), len(val)) == (40, 10)
    row = train.iloc[3]
    question = row["prompt"][0]["content"]
    assert row["extra_info"]["question"] == question
    assert row["extra_info"]["index"] == 3
    assert int(row["reward_model"]["ground_truth"]) == sum(map(int, question.removesuffix("=?").split("+")))
    questions = [{prompt[0]["content"] for prompt in rows["prompt"]} for rows in (train, val)]
    assert not questions[0] & questions[1]

    made = (tmp_path / "policy" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert main(arguments) == 0
    assert "up to date" in capsys.readouterr().out
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mtime_ns == made
