"""What an engine's front end tells of its sequences, and that it stays cheap where there are thousands."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_pivot.verl_ext import sequences as module
from verl_pivot.verl_ext.sequences import SequenceBook, prompt_key

MANY = 4000
MANY_S = 0.05
"""Some milliseconds, on a busy machine."""


def request(prompt: list[int], generated: int, caller_id: str | None = None) -> SimpleNamespace:
    """As vLLM's RequestState."""
    return SimpleNamespace(
        prompt_len=len(prompt),
        prompt_token_ids=prompt,
        detokenizer=SimpleNamespace(output_token_ids=[0] * generated),
        external_req_id=caller_id,
    )


def test_equal_prompts_have_equal_keys() -> None:
    assert prompt_key([1, 2, 3]) == prompt_key((1, 2, 3)) != prompt_key([1, 2])


@pytest.mark.parametrize(("reason", "is_whole"), [("stop", True), ("length", True), ("abort", False), ("error", False)])
def test_a_judgement_goes_by_vllms_own_id(reason: str, is_whole: bool) -> None:
    book, states = SequenceBook(), {"j-1": request([1, 2], 3)}
    group = prompt_key([2, 1, 2])
    assert book.report(states) == {"sequences": [("j-1", group, 2, 3)], "ended": []}
    book.on_finished("j-1", states.pop("j-1"), 1, reason)
    assert book.report(states) == {"sequences": [], "ended": [("j-1", group, 2, 4, is_whole)]}
    assert book.report(states) == {"sequences": [], "ended": []}


def test_a_judgement_that_begins_and_ends_between_two_reports_is_told() -> None:
    book = SequenceBook()
    book.on_finished("j-1", request([1, 2], 3), 1, "stop")
    book.on_finished("gone", None, 1, "abort")
    assert book.report({})["ended"] == [("j-1", prompt_key([2, 1, 2]), 2, 4, True)]


def test_a_judgement_that_is_gone_without_an_end_was_cut_off() -> None:
    book = SequenceBook()
    book.report({"j-1": request([1, 2], 3)})
    assert [end[0::4] for end in book.report({})["ended"]] == [("j-1", False)]


def test_every_judgement_ends_once_though_vllm_says_so_late() -> None:
    """The front end aborts a request, and the engine process, which had just finished it, says so afterwards."""
    book = SequenceBook()
    book.report({"j-1": request([1, 2], 3)})
    book.on_finished("j-1", None, 1, "stop")
    assert len(book.report({})["ended"]) == 1


def test_a_judge_that_is_asked_twice_has_siblings() -> None:
    long = list(range(3000))
    told = SequenceBook().report(
        {"a": request(long, 1), "b": request(list(long), 2), "c": request([*long[:-40], 7], 1)}
    )
    first, again, other = (state[1] for state in told["sequences"])
    assert first == again != other


def test_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOLD", 5)
    book = SequenceBook()
    for number in range(9):
        book.on_finished(f"j-{number}", request([1], 1), 1, "stop")
    report = book.report({f"k-{number}": request([1], 1) for number in range(9)})
    assert [len(told) for told in report.values()] == [5, 5]


def test_thousands_of_sequences_take_milliseconds() -> None:
    book = SequenceBook()
    states: dict[str, Any] = {}
    for number in range(MANY):
        book.begin(f"r{number}", (f"{number:032x}", f"{number // 8:016x}", 500, 1000))
        states[f"r{number}-0a1b"] = request([1] * 500, 2000, f"r{number}")
    took_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        report = book.report(states)
        took_s.append(time.perf_counter() - started_s)
    assert len(report["sequences"]) == MANY
    assert min(took_s) < MANY_S
    assert len(pickle.dumps(report)) < 100 * MANY
