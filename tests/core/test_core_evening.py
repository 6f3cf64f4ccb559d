"""When sequences move between slots of one role although nothing shifts."""

from __future__ import annotations

import pytest
from core_cases import COMPUTE_BOUND, LATENCY_BOUND
from hypothesis import given
from hypothesis import strategies as st

from verl_pivot.core.evening import Sequences, excess

EACH = Sequences(context_tokens=100.0, left_tokens=100.0)


@pytest.mark.parametrize(
    ("inflight", "moved"),
    [
        ({0: 54, 1: 12, 2: 20, 3: 0}, {0: 32}),
        ({0: 30, 1: 30, 2: 0}, {0: 10, 1: 10}),
        ({0: 8, 1: 0}, {0: 4}),
        ({0: 3, 1: 0}, {}),  # one sequence would move
        ({0: 33, 1: 31, 2: 28, 3: 30}, {}),  # even enough
        ({0: 20}, {}),
        ({0: 0, 1: 0}, {}),
        ({}, {}),
    ],
)
def test_the_fullest_give_to_the_emptiest(inflight: dict[int, int], moved: dict[int, int]) -> None:
    assert excess(inflight, COMPUTE_BOUND, EACH) == moved


def test_nothing_moves_where_a_smaller_batch_is_no_faster() -> None:
    assert excess({0: 54, 1: 0}, LATENCY_BOUND, EACH) == {}


def test_nothing_moves_before_costs_are_known() -> None:
    assert excess({0: 54, 1: 0}, None, EACH) == {}


def test_nothing_moves_that_would_end_before_it_has_been_prefilled() -> None:
    """The same batches: a move pays where much is left to generate, and costs where the prompt is most of it."""
    inflight = {0: 40, 1: 0}
    assert excess(inflight, COMPUTE_BOUND, Sequences(100.0, left_tokens=100.0, prefill_s=0.01)) == {0: 20}
    assert excess(inflight, COMPUTE_BOUND, Sequences(100.0, left_tokens=2.0, prefill_s=0.5)) == {}


def test_what_begins_again_moves_only_while_it_has_little_to_lose() -> None:
    inflight = {0: 40, 1: 0}
    assert excess(inflight, COMPUTE_BOUND, Sequences(100.0, left_tokens=100.0, lost_tokens=20.0)) == {0: 20}
    assert excess(inflight, COMPUTE_BOUND, Sequences(100.0, left_tokens=100.0, lost_tokens=900.0)) == {}


@given(inflight=st.dictionaries(st.integers(0, 20), st.integers(0, 200), max_size=8))
def test_no_slot_gives_more_than_its_excess_and_the_others_have_room(inflight: dict[int, int]) -> None:
    moved = excess(inflight, COMPUTE_BOUND, EACH)
    if not moved:
        return
    even = -(-sum(inflight.values()) // len(inflight))
    assert all(inflight[slot_id] - count == even for slot_id, count in moved.items())
    room = sum(max(0, even - count) for count in inflight.values())
    assert sum(moved.values()) <= room
    after = {slot_id: inflight[slot_id] - moved.get(slot_id, 0) for slot_id in inflight}
    for _ in range(sum(moved.values())):  # each goes where fewest are, as admission has it
        after[min(after, key=lambda slot_id: after[slot_id])] += 1
    assert not excess(after, COMPUTE_BOUND, EACH), "once is enough"
