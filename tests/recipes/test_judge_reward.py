"""The reward function that the GPU recipes share, loaded by its path as verl does, against a judge on loopback."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from judge_on_loopback import serving

PATH = Path(__file__).resolve().parents[2] / "recipes" / "common" / "judge_reward.py"


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_reward", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Judge:
    """Writes ``text`` to every request and keeps what it was asked."""

    def __init__(self) -> None:
        self.text = ""
        self.asked: list[dict[str, Any]] = []
        self.address = ""

    async def chat(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": self.text}, "finish_reason": "stop"}]})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "judge"}]})


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    judge = Judge()
    async with serving(judge):
        yield judge


async def score(reward: ModuleType, judge: Judge, text: str, **settings: Any) -> dict[str, float]:
    judge.text = text
    asked = {"question": "What is 6 times 7?"}
    return await reward.compute_score("set", "It is {42}.", "42", asked, judge.address, **settings)


@pytest.mark.parametrize(
    ("text", "expected", "unparsed"),
    [
        ("6 * 7 = 42.\nVerdict: correct", 1.0, 0.0),
        ("<think>Verdict: correct? No, it says 41.</think>\nVerdict: wrong", 0.0, 0.0),
        ("I cannot tell.", 0.0, 1.0),
    ],
)
async def test_verdict_becomes_the_score(
    reward: ModuleType, judge: Judge, text: str, expected: float, unparsed: float
) -> None:
    result = await score(reward, judge, text)
    assert (result["score"], result["judge_unparsed"]) == (expected, unparsed)


async def test_judge_sees_question_reference_and_response_and_the_settings(reward: ModuleType, judge: Judge) -> None:
    await score(reward, judge, "Verdict: correct", max_tokens=77, thinking=False)
    (request,) = judge.asked
    prompt = request["messages"][0]["content"]
    assert all(part in prompt for part in ("What is 6 times 7?", "\n42\n", "It is {42}."))
    assert request["max_tokens"] == 77
    assert request["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(("extra_info", "with_judge"), [({}, True), ({"question": "?"}, False)])
async def test_what_is_missing_is_named(
    reward: ModuleType, judge: Judge, extra_info: dict[str, Any], with_judge: bool
) -> None:
    address = judge.address if with_judge else None
    with pytest.raises(ValueError, match=r"extra_info\['question'\]|reward_model.enable"):
        await reward.compute_score("set", "42", "42", extra_info, address)
