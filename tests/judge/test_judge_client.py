from __future__ import annotations

import asyncio
import random
import time

import pytest
from judge_server import MisbehavingJudge, Step, drops, hangs, replies, says, tears

from verl_pivot.judge import JudgeClient, JudgeError, verdict_parser
from verl_pivot.judge.exchange import Backoff
from verl_pivot.judge.sessions import close_session, state_of_running_loop

YES = says("work: 1+1=2\nverdict: yes")
BUSY = replies('{"error": "no judge awake"}', status=503)


def client(address: str, **changes: object) -> JudgeClient:
    options: dict[str, object] = {
        "router_address": address,
        "prompt": "{question}|{response}",
        "parse_score": verdict_parser(yes="verdict: yes", no="verdict: no"),
        "deadline_s": 5.0,
        "attempt_s": 2.0,
        "backoff": Backoff(first_s=0.01, cap_s=0.05),
    }
    return JudgeClient(**{**options, **changes})  # type: ignore[arg-type]


async def test_sends_one_chat_request_and_parses_the_reply(judge: MisbehavingJudge) -> None:
    judge.steps = [YES]
    result = await client(judge.address, max_tokens=7, extra_body={"seed": 3}).score("1+1=?", "2")
    assert (result.score, result.attempts, result.outcome) == (1.0, 1, "scored")
    assert result.verdict_text.endswith("verdict: yes")
    assert judge.chats == [
        {
            "model": "/models/judge",
            "messages": [{"role": "user", "content": "1+1=?|2"}],
            "temperature": 0.0,
            "max_tokens": 7,
            "seed": 3,
        }
    ]


@pytest.mark.parametrize(
    ("steps", "attempts"),
    [
        pytest.param([BUSY, YES], 2, id="503"),
        pytest.param([BUSY, replies("", 500), replies("", 502), YES], 4, id="several 5xx"),
        pytest.param([replies("", 429), YES], 2, id="429"),
        pytest.param([drops, YES], 2, id="connection dropped"),
        pytest.param([tears, YES], 2, id="torn reply"),
        pytest.param([replies("<html>"), YES], 2, id="not JSON"),
        pytest.param([replies("[1]"), YES], 2, id="JSON, but no object"),
        pytest.param([replies("{}"), YES], 2, id="no choices"),
        pytest.param([replies('{"choices": []}'), YES], 2, id="empty choices"),
        pytest.param([replies('{"choices": [{"message": "yes"}]}'), YES], 2, id="message of the wrong type"),
        pytest.param([replies('{"choices": [{"message": {"content": 1}}]}'), YES], 2, id="content of the wrong type"),
    ],
)
async def test_passing_trouble_is_retried(judge: MisbehavingJudge, steps: list[Step], attempts: int) -> None:
    judge.steps = steps
    judging = client(judge.address)
    result = await judging.score("q", "r")
    assert (result.score, result.attempts, result.outcome) == (1.0, attempts, "scored")
    assert judging.counts == {"retry": attempts - 1, "scored": 1}


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_other_client_errors_are_not_retried(judge: MisbehavingJudge, status: int) -> None:
    judge.steps = [replies('{"message": "prompt too long"}', status), YES]
    with pytest.raises(JudgeError, match=f"refused.*HTTP {status}.*prompt too long") as caught:
        await client(judge.address).score("q", "r")
    assert (caught.value.outcome, caught.value.attempts) == ("rejected", 1)


async def test_a_hanging_attempt_is_given_up_and_retried(judge: MisbehavingJudge) -> None:
    judge.steps = [hangs(30.0, YES), YES]
    started = time.monotonic()
    result = await client(judge.address, attempt_s=0.2).score("q", "r")
    assert result.attempts == 2
    assert 0.2 <= time.monotonic() - started < 2.0


async def test_a_slow_judge_within_the_attempt_is_waited_for(judge: MisbehavingJudge) -> None:
    judge.steps = [hangs(0.4, YES)]
    result = await client(judge.address).score("q", "r")
    assert (result.attempts, result.outcome) == (1, "scored")
    assert 0.4 <= result.seconds < 2.0


@pytest.mark.parametrize(
    "step",
    [hangs(30.0, YES), BUSY, drops, replies("", 503, {"Retry-After": "0.2"})],
    ids=["hang", "503", "drop", "wait"],
)
async def test_the_deadline_holds_whatever_the_trouble(judge: MisbehavingJudge, step: Step) -> None:
    judge.steps = [step]
    started = time.monotonic()
    with pytest.raises(JudgeError, match=r"deadline_s=0\.5") as caught:
        await client(judge.address, deadline_s=0.5, retries=10_000).score("q", "r")
    assert caught.value.outcome == "deadline"
    assert time.monotonic() - started < 1.5


async def test_the_deadline_covers_asking_for_the_model(judge: MisbehavingJudge) -> None:
    judge.model_steps = [hangs(30.0, YES)]
    started = time.monotonic()
    with pytest.raises(JudgeError, match="deadline") as caught:
        await client(judge.address, deadline_s=0.3).score("q", "r")
    assert caught.value.attempts == 0
    assert time.monotonic() - started < 1.3


async def test_retry_after_is_waited_out(judge: MisbehavingJudge) -> None:
    judge.steps = [replies("", 503, {"Retry-After": "0.5"}), YES]
    result = await client(judge.address).score("q", "r")
    assert result.attempts == 2
    assert result.seconds >= 0.5


async def test_no_waiting_for_a_retry_beyond_the_deadline(judge: MisbehavingJudge) -> None:
    judge.steps = [replies("", 503, {"Retry-After": "3600"})]
    started = time.monotonic()
    with pytest.raises(JudgeError, match="next try would be after"):
        await client(judge.address).score("q", "r")
    assert time.monotonic() - started < 1.0


async def test_refused_connections_use_up_the_retries(closed_port: int) -> None:
    judging = client(f"127.0.0.1:{closed_port}", model="m", retries=3)
    with pytest.raises(JudgeError, match=rf"127\.0\.0\.1:{closed_port}.*4 failed tries") as caught:
        await judging.score("q", "r")
    assert (caught.value.outcome, caught.value.attempts) == ("unreachable", 4)
    assert judging.counts == {"retry": 3, "unreachable": 1}
    await close_session()


async def test_unavailable_score_stands_in_only_when_asked_for(closed_port: int) -> None:
    judging = client(f"127.0.0.1:{closed_port}", model="m", retries=0, unavailable_score=0.25, default_score=0.5)
    result = await judging.score("q", "r")
    assert (result.score, result.outcome, result.verdict_text) == (0.25, "unreachable", "")
    await close_session()


async def test_garbage_is_asked_again_at_a_higher_temperature(judge: MisbehavingJudge) -> None:
    judge.steps = [says("hm"), YES]
    judging = client(judge.address, garbage_temperature=0.6)
    result = await judging.score("q", "r")
    assert (result.score, result.attempts, result.outcome) == (1.0, 2, "scored")
    assert [chat["temperature"] for chat in judge.chats] == [0.0, 0.6]
    assert judging.counts == {"garbage_retry": 1, "scored": 1}


@pytest.mark.parametrize("garbage", ["hm", "", None], ids=["words", "empty", "null"])
async def test_lasting_garbage_scores_the_default(judge: MisbehavingJudge, garbage: str | None) -> None:
    judge.steps = [says(garbage)]
    judging = client(judge.address, garbage_retries=2, default_score=0.5)
    result = await judging.score("q", "r")
    assert (result.score, result.attempts, result.outcome) == (0.5, 3, "unparsed")
    assert result.verdict_text == (garbage or "")
    assert judging.counts == {"garbage_retry": 2, "unparsed": 1}


async def test_lasting_garbage_without_default_is_an_error_that_says_why(judge: MisbehavingJudge) -> None:
    judge.steps = [says("let me think", finish_reason="length")]
    with pytest.raises(JudgeError, match=r"cut off at max_tokens=5.*let me think") as caught:
        await client(judge.address, garbage_retries=0, max_tokens=5).score("q", "r")
    assert caught.value.outcome == "unparsed"
    assert caught.value.verdict_text == "let me think"


async def test_the_model_is_asked_for_once(judge: MisbehavingJudge) -> None:
    judge.steps = [YES]
    judge.model_steps = [BUSY, hangs(0.1, replies('{"data": [{"id": "m"}]}'))]
    judgings = [client(judge.address) for _ in range(2)]
    await asyncio.gather(*(judging.score("q", "r") for judging in judgings for _ in range(10)))
    assert judge.model_requests == 2  # the failed one and its retry, for all twenty
    assert {chat["model"] for chat in judge.chats} == {"m"}


async def test_a_refused_model_name_is_asked_for_again(judge: MisbehavingJudge) -> None:
    judge.steps = [replies("no such model", 404), YES]
    judge.model_steps = [replies('{"data": [{"id": "old"}]}'), replies('{"data": [{"id": "new"}]}')]
    judging = client(judge.address)
    with pytest.raises(JudgeError):
        await judging.score("q", "r")
    await judging.score("q", "r")
    assert [chat["model"] for chat in judge.chats] == ["old", "new"]


async def test_unicode_goes_through_unharmed(judge: MisbehavingJudge) -> None:
    judge.steps = [says("ürteil ✓ verdict: yes 判")]
    result = await client(judge.address).score("q", 'a "b" \n\\ {x} 判断 🙂 \ud83d\ude42 \ud800 \x00')
    assert judge.chats[0]["messages"][0]["content"] == 'q|a "b" \n\\ {x} 判断 🙂 🙂 \ufffd \x00'
    assert "判断".encode() in judge.raw_chats[0]
    assert result.verdict_text == "ürteil ✓ verdict: yes 判"


async def test_a_callable_prompt_gives_text_or_messages(judge: MisbehavingJudge) -> None:
    judge.steps = [YES]

    def as_text(question: str, response: str, truth: str) -> str:
        return f"{truth}:{response}"

    def as_messages(question: str, response: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": "judge"}, {"role": "user", "content": response}]

    await client(judge.address, prompt=as_text).score("q", "r", truth="t")
    await client(judge.address, prompt=as_messages).score("q", "r")
    first, second = (chat["messages"] for chat in judge.chats)
    assert first == [{"role": "user", "content": "t:r"}]
    assert [message["role"] for message in second] == ["system", "user"]


async def test_a_missing_prompt_field_is_named(judge: MisbehavingJudge) -> None:
    with pytest.raises(ValueError, match="'truth'"):
        await client(judge.address, prompt="{response} {truth}").score("q", "r")


async def test_proxies_from_the_environment_are_not_used(
    judge: MisbehavingJudge, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    judge.steps = [YES]
    assert (await client(judge.address).score("q", "r")).outcome == "scored"


async def test_cancelling_a_score_cancels_it(judge: MisbehavingJudge) -> None:
    judge.steps = [hangs(30.0, YES)]
    scoring = asyncio.create_task(client(judge.address).score("q", "r"))
    while not judge.chats:
        await asyncio.sleep(0.01)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


def test_each_event_loop_has_its_own_session() -> None:
    async def session_ids() -> tuple[int, int]:
        first, second = state_of_running_loop().session, state_of_running_loop().session
        await close_session()
        assert state_of_running_loop().session is not first
        await close_session()
        return id(first), id(second)

    for _ in range(2):
        first, second = asyncio.run(session_ids())
        assert first == second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_address": ""}, "router_address"),
        ({"router_address": "https://judge:1"}, "router_address"),
        ({"prompt": "grade this"}, "response"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"attempt_s": -1.0}, "attempt_s"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"retries": -1}, "retries"),
        ({"garbage_retries": -1}, "garbage_retries"),
        ({"temperature": -0.1}, "temperature"),
    ],
)
def test_unusable_options_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client("127.0.0.1:1", **change)


def test_the_router_address_may_come_as_a_url() -> None:
    assert client("http://[::1]:80/").router_address == "[::1]:80"


@pytest.mark.parametrize(
    ("failures", "retry_after_s", "low", "high"),
    [(1, None, 0.5, 1.0), (3, None, 2.0, 4.0), (9, None, 4.0, 8.0), (10_000, None, 4.0, 8.0), (1, 60.0, 60.0, 60.0)],
)
def test_backoff_doubles_up_to_its_cap(failures: int, retry_after_s: float | None, low: float, high: float) -> None:
    delays = [Backoff(1.0, 8.0).delay_s(failures, retry_after_s, random.Random(seed)) for seed in range(200)]
    assert low <= min(delays) <= max(delays) <= high
    if low < high:
        assert max(delays) - min(delays) > 0.8 * (high - low)
