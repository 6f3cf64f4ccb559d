"""A response over servers that leave or die: what is joined, what is left to generate, what is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray_errors import EngineDeadError, task_error
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_pivot.verl_ext.client import ShiftLLMServerClient
from verl_pivot.verl_ext.engine_death import engine_died
from verl_pivot.verl_ext.sequences import prompt_key

PROMPT = [7, 8, 9]


def output(tokens: list[int], stop_reason: str = "aborted", version: int | None = 3, **more: Any) -> TokenOutput:
    """What one server gives back: each token with a logprob of its own."""
    return TokenOutput(
        token_ids=tokens,
        log_probs=[-token / 10 for token in tokens],
        stop_reason=stop_reason,
        num_preempted=1,
        **{"extra_fields": {"global_steps": version}, **more},
    )


def config(response_length: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=response_length)))


class ListedAttempts(ShiftLLMServerClient):
    """Its attempts come from a list (None: the server was lost); notes what each was asked."""

    def __init__(self, *attempts: TokenOutput | None, response_length: int | None = None) -> None:
        super().__init__(config(response_length))
        self.attempts = list(attempts)
        self.prompts: list[list[int]] = []
        self.sampling: list[dict[str, Any]] = []

    async def _attempt(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict[str, Any]
    ) -> TokenOutput | None:
        self.prompts.append(prompt_ids)
        self.sampling.append(sampling_params)
        return self.attempts.pop(0)

    async def respond(self, **sampling_params: Any) -> TokenOutput:
        response = await self.generate("r", prompt_ids=PROMPT, sampling_params=sampling_params)
        assert not self.attempts, "all of them were needed"
        return response


async def test_tokens_and_logprobs_of_all_attempts_are_joined() -> None:
    client = ListedAttempts(output([1, 2]), output([3], "completed"))
    response = await client.respond(max_tokens=10)
    assert response.token_ids == [1, 2, 3]
    assert response.log_probs == [-0.1, -0.2, -0.3]
    assert response.stop_reason == "completed"
    assert response.num_preempted == 2
    assert response.extra_fields["num_resumes"] == 1
    assert client.prompts == [PROMPT, [*PROMPT, 1, 2]]


@pytest.mark.parametrize(
    ("response_length", "sampling_params", "key"),
    [
        (None, {"max_tokens": 5}, "max_tokens"),
        (None, {"max_new_tokens": 5}, "max_new_tokens"),
        (5, {}, "max_tokens"),
        (5, {"max_tokens": None}, "max_tokens"),
        (9, {"max_tokens": 5}, "max_tokens"),
    ],
)
async def test_each_attempt_gets_what_is_left_of_the_budget(
    response_length: int | None, sampling_params: dict[str, Any], key: str
) -> None:
    attempts = (output([1, 2]), None, output([]), output([3]), output([4], "completed"))
    client = ListedAttempts(*attempts, response_length=response_length)
    response = await client.respond(temperature=0.5, **sampling_params)
    assert response.token_ids == [1, 2, 3, 4]
    assert client.sampling == [{"temperature": 0.5, key: left} for left in (5, 3, 3, 3, 2)]


async def test_without_any_limit_the_server_decides() -> None:
    client = ListedAttempts(output([1]), output([2], "completed"))
    await client.respond(temperature=0.5)
    assert client.sampling == [{"temperature": 0.5}] * 2


@pytest.mark.parametrize(("stop_reason", "reported"), [("aborted", "length"), ("abort", "length"), ("stop", "stop")])
async def test_a_budget_that_is_used_up_ends_the_response(stop_reason: str, reported: str) -> None:
    response = await ListedAttempts(output([1, 2]), output([3], stop_reason)).respond(max_tokens=3)
    assert (response.token_ids, response.stop_reason) == ([1, 2, 3], reported)


@pytest.mark.parametrize(
    ("attempts", "lowest", "highest", "last"),
    [
        ([(3, [1]), (4, [2])], 3, 4, 4),
        ([(3, [1]), (4, [2]), (4, [3])], 3, 4, 4),
        ([(2, []), (3, [1])], 3, 3, 3),  # no token is of version 2
        ([(3, [1]), (4, [])], 3, 3, 3),
        ([(None, [1])], None, None, None),
    ],
)
async def test_versions_are_those_that_made_a_token(
    attempts: list[tuple[int | None, list[int]]], lowest: int | None, highest: int | None, last: int | None
) -> None:
    outputs = [output(tokens, version=version) for version, tokens in attempts]
    outputs[-1].stop_reason = "completed"
    fields = (await ListedAttempts(*outputs).respond(max_tokens=10)).extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (lowest, highest)
    assert fields["global_steps"] == last


async def test_a_lost_attempt_costs_its_own_tokens_only_and_is_tried_again() -> None:
    client = ListedAttempts(None, output([1, 2]), None, output([3], "completed", version=4))
    response = await client.respond(max_tokens=10)
    assert response.token_ids == [1, 2, 3]
    assert client.prompts == [PROMPT, PROMPT, [*PROMPT, 1, 2], [*PROMPT, 1, 2]]
    fields = response.extra_fields
    assert (fields["num_resumes"], fields["min_global_steps"], fields["max_global_steps"]) == (3, 3, 4)


async def test_routed_experts_are_joined() -> None:
    """Each attempt tells them for its whole prompt; later ones add those of their own tokens."""
    first = np.arange(5).reshape(5, 1, 1)  # three tokens of the prompt, two generated
    none_made = np.full((5, 1, 1), 50)
    second = np.arange(100, 106).reshape(6, 1, 1)
    response = await ListedAttempts(
        output([1, 2], routed_experts=first),
        output([], routed_experts=none_made),
        output([3], "completed", routed_experts=second),
    ).respond(max_tokens=10)
    assert response.routed_experts.tolist() == [[[0]], [[1]], [[2]], [[3]], [[4]], [[105]]]


async def test_other_fields_are_those_of_the_first_attempt_that_has_them() -> None:
    first = output([1], extra_fields={"global_steps": 3, "num_cached_tokens": 2, "mine": "first"})
    second = output([2], "completed", extra_fields={"global_steps": 3, "num_cached_tokens": 4, "mine": "second"})
    fields = (await ListedAttempts(first, second).respond(max_tokens=10)).extra_fields
    assert (fields["num_cached_tokens"], fields["mine"]) == (2, "first")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RayActorError(), True),
        (ActorDiedError(), True),
        (task_error(EngineDeadError("gone")), True),
        (RayTaskError("method", "Traceback", EngineDeadError("gone"), proctitle="p", pid=1, ip="127.0.0.1"), True),
        (task_error(ValueError("the prompt is too long")), False),
        (ValueError("no cause"), False),
    ],
)
def test_a_dead_engine_is_told_from_a_refused_request(error: Exception, expected: bool) -> None:
    assert engine_died(error) is expected


class Balancer:
    """``report_lost`` of the control plane."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.report_lost = SimpleNamespace(remote=self._report_lost)

    async def _report_lost(self, request_id: str) -> None:
        self.lost.append(request_id)


def servers(monkeypatch: pytest.MonkeyPatch, *answers: TokenOutput | Exception) -> list[dict[str, Any]]:
    """What verl's client gets from its servers, one after another; returns what they are asked."""
    left, asked = list(answers), []

    async def generate(self: Any, request_id: str, **kwargs: Any) -> TokenOutput:
        asked.append({"request_id": request_id, **kwargs})
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    return asked


@pytest.mark.parametrize("error", [ActorDiedError(), task_error(EngineDeadError("gone"))], ids=["actor", "engine"])
async def test_a_dead_engine_is_reported_before_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = servers(monkeypatch, output([1]), error, output([2], "completed"))
    balancer = Balancer()
    client = ShiftLLMServerClient(config(), load_balancer_handle=balancer)
    response = await client.generate("r", prompt_ids=PROMPT, sampling_params={"max_tokens": 4}, image_data=["image"])
    assert (response.token_ids, response.extra_fields["num_resumes"]) == ([1, 2], 2)
    assert balancer.lost == ["r"]
    sequences = [one.pop("sequence") for one in asked]
    resumed = {"prompt_ids": [*PROMPT, 1], "sampling_params": {"max_tokens": 3}}
    first = {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
    assert asked == [{"request_id": "r", "image_data": ["image"], **one} for one in (first, resumed, resumed)]
    assert len({key for key, *_ in sequences}) == 1, "one response, whatever it took"
    assert [rest for _, *rest in sequences] == [[prompt_key(PROMPT), 3, tokens] for tokens in (0, 1, 1)]


async def test_siblings_share_a_group_and_later_turns_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = servers(monkeypatch, *[output([1], "completed") for _ in range(4)])
    client = ShiftLLMServerClient(config(), load_balancer_handle=Balancer())
    for session, prompt in (("a", PROMPT), ("b", PROMPT), ("a", [*PROMPT, 1, 2]), ("c", [1])):
        await client.generate(session, prompt_ids=prompt, sampling_params={"max_tokens": 4})
    keys, groups = zip(*[one["sequence"][:2] for one in asked], strict=True)
    assert len(set(keys)) == 4
    assert groups == (prompt_key(PROMPT), prompt_key(PROMPT), "", prompt_key([1]))


async def test_the_error_of_a_request_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, task_error(ValueError("the prompt is too long")))
    balancer = Balancer()
    client = ShiftLLMServerClient(config(), load_balancer_handle=balancer)
    with pytest.raises(ValueError, match="the prompt is too long"):
        await client.generate("r", prompt_ids=PROMPT, sampling_params={"max_tokens": 4})
    assert balancer.lost == []
