"""Every sequence that begins ends exactly once, whatever order its engines tell of it in."""

from __future__ import annotations

import random

import pytest

from verl_pivot.core import ledger as ledger_module
from verl_pivot.core.forecast import RoleForecast
from verl_pivot.core.ledger import UNSEEN_S, SequenceLedger
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.sequences import SequenceEnd, SequenceState

BUDGET = 100


class CountingForecast(RoleForecast):
    """Notes what it is told, and fails on what may not be."""

    def __init__(self) -> None:
        super().__init__(LengthPredictor(BUDGET), siblings=4)
        self.open: set[str] = set()
        self.ended: dict[str, int] = {}
        self.cancelled: set[str] = set()

    def begin(self, sequences, siblings=None) -> None:  # type: ignore[no-untyped-def]
        for sequence in sequences:
            assert sequence.key not in self.open | self.cancelled | self.ended.keys(), "begins once"
            self.open.add(sequence.key)
        super().begin(sequences, siblings)

    def end(self, key, tokens) -> None:  # type: ignore[no-untyped-def]
        self.open.remove(key)
        self.ended[key] = tokens
        super().end(key, tokens)

    def cancel(self, key) -> None:  # type: ignore[no-untyped-def]
        self.open.remove(key)
        self.cancelled.add(key)
        super().cancel(key)


def ledger_of(goes_on: bool = True) -> tuple[SequenceLedger, CountingForecast]:
    forecast = CountingForecast()
    return SequenceLedger(forecast, goes_on=goes_on, max_tokens=BUDGET), forecast


def at(key: str, tokens: int, group: str = "g") -> SequenceState:
    return SequenceState(key, group, 10, tokens)


def over(key: str, tokens: int, is_whole: bool = True) -> SequenceEnd:
    return SequenceEnd(key, "g", 10, tokens, is_whole)


def test_a_migration_keeps_the_key_and_adds_tokens() -> None:
    ledger, forecast = ledger_of()
    ledger.observe([at("a", 0)], 0, 0.0)  # queued
    ledger.observe([at("a", 5)], 0, 1.0)  # in an engine
    ledger.end([over("a", 9, is_whole=False)], 0, 2.0)
    assert [o.generated_tokens for o in ledger.observations()] == [9]
    ledger.observe([at("a", 20)], 0, 3.0)  # in another one
    ledger.end([over("a", 30)], 0, 4.0)
    assert (forecast.ended, len(ledger), ledger.begun, ledger.whole) == ({"a": 30}, 0, 1, 1)


def test_what_an_engine_told_of_a_sequence_that_is_over_counts_no_more() -> None:
    ledger, forecast = ledger_of()
    ledger.observe([at("a", 5)], 0, 0.0)
    ledger.end([over("a", 30)], 0, 1.0)
    ledger.observe([at("a", 6)], 0, 1.0)
    ledger.end([over("a", 9, is_whole=False), over("a", 30)], 0, 1.0)
    assert (len(ledger), forecast.ended) == (0, {"a": 30})


def test_a_short_sequence_that_nobody_saw_running_counts_too() -> None:
    ledger, forecast = ledger_of()
    ledger.end([over("a", 3), over("b", 2, is_whole=False)], 0, 0.0)
    assert (forecast.ended, ledger.begun) == ({"a": 3}, 1), "what was cut off is seen when it goes on"


def test_a_sequence_cut_off_at_its_budget_is_whole() -> None:
    ledger, forecast = ledger_of()
    ledger.observe([at("a", 90)], 0, 0.0)
    ledger.end([over("a", BUDGET, is_whole=False)], 0, 1.0)
    assert forecast.ended == {"a": BUDGET}


def test_a_judgement_that_is_cut_off_is_over() -> None:
    ledger, forecast = ledger_of(goes_on=False)
    ledger.observe([at("a", 5)], 0, 0.0)
    ledger.end([over("a", 0, is_whole=False)], 0, 1.0)
    assert (forecast.cancelled, ledger.cut_off) == ({"a"}, 1)


def test_what_nobody_tells_of_for_long_is_given_up() -> None:
    ledger, forecast = ledger_of()
    ledger.observe([at("a", 5), at("b", 5)], 0, 0.0)
    ledger.observe([at("b", 6)], 0, UNSEEN_S)
    ledger.give_up_unseen(UNSEEN_S + 1)
    assert (forecast.cancelled, forecast.open) == ({"a"}, {"b"})


def test_tokens_that_were_lost_with_an_engine_are_not_counted() -> None:
    ledger, _ = ledger_of()
    ledger.observe([at("a", 50)], 0, 0.0)
    ledger.observe([at("a", 10)], 0, 1.0)
    assert ledger.observations()[0].generated_tokens == 10


def test_groups_are_as_old_as_their_first_sequence() -> None:
    ledger, _ = ledger_of()
    ledger.observe([at("a", 1, "old")], 3, 0.0)
    ledger.observe([at("b", 1, "old"), at("c", 1, "new")], 5, 1.0)
    ledger.observations()
    assert (ledger.born("old"), ledger.born("new")) == (3, 5)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_REMEMBERED", 50)
    ledger, _ = ledger_of()
    for number in range(60):
        ledger.end([SequenceEnd(f"s{number}", "", 10, 3, True)], 0, 0.0)
    assert len(ledger._over) == 50
    ledger.observations()
    assert not ledger._born


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("goes_on", [True, False])
def test_at_random_every_sequence_ends_once(seed: int, goes_on: bool) -> None:
    """Sequences begin, move, end, or vanish; engines tell late, twice, or not at all."""
    rng = random.Random(seed)
    ledger, forecast = ledger_of(goes_on)
    tokens: dict[str, int] = {}
    late: list[SequenceState] = []
    truly_ended: dict[str, int] = {}
    vanished: set[str] = set()
    for now_s in range(300):
        if rng.random() < 0.5 and now_s < 200:
            tokens[f"s{now_s}"] = 0
        ends = []
        for key in list(tokens):
            tokens[key] = min(BUDGET, tokens[key] + rng.randrange(8))
            chance = rng.random()
            if chance < 0.05 or tokens[key] == BUDGET:
                truly_ended[key] = max(1, tokens.pop(key))
                ends.append(over(key, truly_ended[key]))
            elif chance < 0.1:
                ends.append(over(key, tokens[key], is_whole=False))
                if not goes_on:  # it begins again under another key
                    vanished.add(key)
                    tokens.pop(key)
            elif chance < 0.11:
                tokens.pop(key)
                vanished.add(key)
        told = [at(key, count, key) for key, count in tokens.items() if rng.random() < 0.9]
        for is_end in rng.sample([True, False], 2):
            if is_end:
                ledger.end(ends, 0, now_s)
            else:
                ledger.observe(told + late, 0, now_s)
        late = told if rng.random() < 0.2 else []
        ledger.give_up_unseen(now_s)
        assert ledger.begun == ledger.whole + ledger.cut_off + len(ledger)
        assert forecast.open == {o.key for o in ledger.observations()}
    ledger.give_up_unseen(300 + 2 * UNSEEN_S)
    assert len(ledger) == 0
    assert forecast.ended == truly_ended
    assert forecast.cancelled <= vanished
