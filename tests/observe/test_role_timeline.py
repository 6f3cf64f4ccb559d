"""Events to intervals: tables of small runs, and properties that hold for any events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_pivot.observe.kinds import FAILED, ROLES, SHIFTING
from verl_pivot.observe.timeline import build_timeline, shift_counts, slots_by_state


def start(*roles, t_s=0.0):
    slots = [{"slot": i, "role": role, "can_host": list(ROLES)} for i, role in enumerate(roles)]
    return {"t_s": t_s, "kind": "run_start", "run_id": "r", "slots": slots, "config": {}}


def end(t_s):
    return {"t_s": t_s, "kind": "run_end", "outcome": "finished", "lost": 0, "prompts": 0, "responses": 0, "rewards": 0}


def shift(slot, source, target, t_start_s, duration_s, outcome="done"):
    return {
        "t_s": t_start_s + duration_s,
        "kind": "shift",
        "slot": slot,
        "source": source,
        "target": target,
        "t_start_s": t_start_s,
        "duration_s": duration_s,
        "outcome": outcome,
    }


def failed(slot, t_s):
    return {"t_s": t_s, "kind": "slot_failed", "slot": slot}


def recovered(slot, role, t_s):
    return {"t_s": t_s, "kind": "slot_recovered", "slot": slot, "role": role}


def load(t_s, *slots):
    """``slots``: (role, running) or (role, running, status) of slot 0, 1, ..."""
    entries = {}
    for i, (role, running, *status) in enumerate(slots):
        state = status[0] if status else "serving"
        entries[str(i)] = {"role": role, "status": state, "running": running, "waiting": 0, "tokens_per_s": 0.0}
    return {"t_s": t_s, "kind": "load", "slots": entries, "queued": {"rollout": 0, "genrm": 0}}


def lease(t_s, state):
    return {"t_s": t_s, "kind": "lease", "state": state}


def span(t_start_s, duration_s, role="train"):
    event = {"kind": "span", "role": role, "name": "update_actor", "t_start_s": t_start_s, "duration_s": duration_s}
    return {"t_s": t_start_s + duration_s, **event}


def in_order(*events):
    return sorted(events, key=lambda e: e["t_s"])


@pytest.mark.parametrize(
    ("events", "row"),
    [
        ([], [(0, 10, "rollout")]),
        ([shift(0, "rollout", "genrm", 2, 3)], [(0, 2, "rollout"), (2, 5, SHIFTING), (5, 10, "genrm")]),
        (
            [shift(0, "rollout", "genrm", 2, 3, "rolled_back")],
            [(0, 2, "rollout"), (2, 5, SHIFTING), (5, 10, "rollout")],
        ),
        ([shift(0, "rollout", "genrm", 2, 3, "failed")], [(0, 2, "rollout"), (2, 5, SHIFTING), (5, 10, FAILED)]),
        # the failure is told as well, a little before the shift that ended in it
        (
            [failed(0, 4.5), shift(0, "rollout", "genrm", 2, 3, "failed"), recovered(0, "rollout", 8)],
            [(0, 2, "rollout"), (2, 4.5, SHIFTING), (4.5, 8, FAILED), (8, 10, "rollout")],
        ),
        ([failed(0, 4), recovered(0, "genrm", 6)], [(0, 4, "rollout"), (4, 6, FAILED), (6, 10, "genrm")]),
        # one shift begins as another ends, and rounding makes them overlap by a hair
        (
            [shift(0, "rollout", "genrm", 2, 3.0001), shift(0, "genrm", "train", 5, 2)],
            [(0, 2, "rollout"), (2, 5, SHIFTING), (5, 7, SHIFTING), (7, 10, "train")],
        ),
        ([shift(0, "rollout", "genrm", 4, 0)], [(0, 4, "rollout"), (4, 10, "genrm")]),
        ([shift(0, "rollout", "genrm", 8, 5)], [(0, 8, "rollout"), (8, 10, SHIFTING), (10, 10, "genrm")]),
        ([shift(7, "rollout", "genrm", 2, 3)], [(0, 10, "rollout")]),
    ],
)
def test_intervals(events, row):
    timeline = build_timeline(in_order(start("rollout"), *events, end(10.0)))
    assert list(timeline.intervals[0]) == row


def test_a_killed_run_ends_at_its_last_event_inside_the_shift_it_was_in():
    sample = ("rollout", 0, SHIFTING)
    events = [start("rollout", "rollout"), load(1, ("rollout", 2), ("rollout", 2)), load(2, sample, ("rollout", 2))]
    timeline = build_timeline([*events, load(3, sample, ("rollout", 2)), lease(3.5, "wanted")])
    assert timeline.intervals[0] == ((0, 2, "rollout"), (2, 3.5, SHIFTING))
    assert timeline.intervals[1] == ((0, 3.5, "rollout"),)


def test_a_sample_taken_during_a_shift_that_was_told_adds_nothing():
    events = [start("rollout"), load(2, ("rollout", 0, SHIFTING)), shift(0, "rollout", "genrm", 1, 2), end(9.0)]
    assert build_timeline(events).intervals[0] == ((0, 1, "rollout"), (1, 3, SHIFTING), (3, 9, "genrm"))


def test_each_load_sample_stands_for_the_time_nearest_to_it():
    events = [
        start("rollout"),
        *(load(t, ("rollout", n)) for t, n in ((1, 4), (3, 2), (5, 0), (7, 0), (9, 1))),
        end(10.0),
    ]
    timeline = build_timeline(events)
    assert timeline.busy[0] == ((0, 4, "rollout"), (8, 10, "rollout"))
    assert timeline.busy_seconds()["rollout"] == 6
    assert timeline.idle_seconds()["rollout"] == 4
    assert timeline.busy_fraction() == {"rollout": 0.6, "genrm": None, "train": None}


def test_samples_count_only_for_the_role_they_were_taken_in():
    events = in_order(
        start("rollout"),
        load(1, ("rollout", 3)),
        shift(0, "rollout", "genrm", 2, 2),
        load(3, ("rollout", 3, SHIFTING)),
        load(5, ("rollout", 3)),  # stale: the slot is genrm by now
        end(8.0),
    )
    timeline = build_timeline(events)
    assert timeline.busy_seconds() == {"rollout": 2, "genrm": 0, "train": 0}


@pytest.mark.parametrize(
    ("leases", "spans", "busy_s"),
    [
        ([], [span(1, 2)], 2),
        ([lease(0, "held")], [span(1, 2), span(1.5, 1), span(4, 1)], 3),  # nested spans count once
        ([lease(0, "wanted"), lease(2, "held"), lease(5, "free")], [span(1, 2), span(4, 3)], 2),
        ([lease(0, "free")], [span(1, 2)], 0),
        ([lease(0, "held"), lease(3, "held")], [span(2, 2)], 2),
        ([lease(0, "held")], [span(1, 2, role="rollout")], 0),
        ([lease(0, "held")], [span(8, 7)], 2),
    ],
)
def test_training_slots_work_inside_spans_under_the_lease(leases, spans, busy_s):
    events = in_order(start("train", "train", "rollout"), *leases, *spans, end(10.0))
    assert build_timeline(events).busy_seconds() == {"rollout": 0, "genrm": 0, "train": 2 * busy_s}


def test_a_window_of_a_run_starts_from_given_states():
    events = [lease(-3.0, "held"), shift(0, "rollout", "train", 4, 2), span(5, 4)]
    timeline = build_timeline(events, initial={0: "rollout", 1: FAILED}, start_s=5.0, end_s=8.0)
    assert timeline.intervals == {0: ((5, 6, SHIFTING), (6, 8, "train")), 1: ((5, 8, FAILED),)}
    assert timeline.busy_seconds()["train"] == 2


def test_no_run_start_is_told():
    with pytest.raises(ValueError, match="no run_start"):
        build_timeline([lease(1.0, "held")])


def test_only_completed_shifts_are_counted():
    events = [
        shift(0, "rollout", "genrm", 1, 1),
        shift(1, "rollout", "genrm", 1, 1),
        shift(0, "genrm", "train", 3, 1),
        shift(1, "genrm", "train", 3, 1, "rolled_back"),
    ]
    assert shift_counts(events) == {"rollout->genrm": 2, "genrm->train": 1}


def test_slots_by_state_follows_the_intervals():
    events = in_order(start("rollout", "genrm"), shift(0, "rollout", "genrm", 2, 3), end(10.0))
    steps = [(t_s, {s: n for s, n in counts.items() if n}) for t_s, counts in slots_by_state(build_timeline(events))]
    expected = [{"rollout": 1, "genrm": 1}, {SHIFTING: 1, "genrm": 1}, {"genrm": 2}]
    assert steps == list(zip((0, 2, 5), expected, strict=True))


SLOTS = 3
times = st.floats(-5, 60, allow_nan=False)
durations = st.floats(0, 20)
slot_ids = st.integers(0, SLOTS - 1)
roles = st.sampled_from(ROLES)
any_event = st.one_of(
    st.builds(shift, slot_ids, roles, roles, times, durations, st.sampled_from(["done", "rolled_back", "failed"])),
    st.builds(failed, slot_ids, times),
    st.builds(recovered, slot_ids, roles, times),
    st.builds(lease, times, st.sampled_from(["wanted", "held", "free"])),
    st.builds(span, times, durations),
    st.builds(
        load,
        times,
        *[st.tuples(roles, st.integers(0, 2), st.sampled_from(["serving", SHIFTING, FAILED])) for _ in range(SLOTS)],
    ),
)


@settings(max_examples=150, deadline=None)
@given(events=st.lists(any_event, max_size=25), ends=st.booleans(), end_s=st.floats(0, 50))
def test_any_events_give_whole_rows_and_conserve_slot_seconds(events, ends, end_s):
    run = in_order(start("rollout", "genrm", "train", t_s=-6.0), *events, *([end(end_s)] if ends else []))
    timeline = build_timeline(run)
    assert timeline.end_s == (end_s if ends else max(e["t_s"] for e in run))
    for slot, row in timeline.intervals.items():
        assert row[0].start_s == timeline.start_s == -6.0
        assert row[-1].end_s == timeline.end_s
        for one, following in pairwise(row):
            assert one.start_s < one.end_s == following.start_s
        assert_inside(timeline.busy[slot], row)
    held, busy = timeline.slot_seconds(), timeline.busy_seconds()
    assert sum(held.values()) == pytest.approx(SLOTS * timeline.wall_s)
    assert all(busy[role] <= held[role] + 1e-9 for role in ROLES)


def assert_inside(parts, row):
    """Busy parts are ordered, do not overlap, and each lies in an interval of its role."""
    for one, following in pairwise(parts):
        assert one.end_s <= following.start_s
    for part in parts:
        assert part.start_s < part.end_s
        assert any(r.start_s <= part.start_s and part.end_s <= r.end_s and r.state == part.state for r in row)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(any_event, max_size=15), cut_s=st.floats(0, 50))
def test_slots_by_state_always_adds_up_to_all_slots(events, cut_s):
    timeline = build_timeline(in_order(start("rollout", "genrm", "train", t_s=-6.0), *events, end(cut_s)))
    for _, counts in slots_by_state(timeline):
        assert sum(counts.values()) == SLOTS
        assert min(counts.values()) >= 0
