"""The slot's state machine: every allowed path, and refusals that name what was wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from verl_pivot.core.snapshot import Role, SlotStatus
from verl_pivot.runtime.slots import EngineState, Slot, SlotError, SlotTable

ROLLOUT, GENRM, TRAIN = Role.ROLLOUT, Role.GENRM, Role.TRAIN
AWAKE, ASLEEP, UNSETTLED, DEAD = EngineState.AWAKE, EngineState.ASLEEP, EngineState.UNSETTLED, EngineState.DEAD


def serving_slot(role: Role = ROLLOUT, can_host: frozenset[Role] = frozenset(Role)) -> Slot:
    slot = Slot(3, role, can_host)
    if role is not TRAIN:
        slot.set_engine(role, AWAKE)
    slot.finish(1.0)
    return slot


def test_a_shift_from_rollout_to_genrm() -> None:
    slot = serving_slot()
    slot.begin_shift(GENRM)
    assert (slot.role, slot.target, slot.status, slot.committed) == (ROLLOUT, GENRM, SlotStatus.SHIFTING, False)
    slot.set_engine(ROLLOUT, ASLEEP)
    slot.commit()
    slot.set_engine(GENRM, AWAKE)
    slot.finish(7.0)
    assert (slot.role, slot.target, slot.status, slot.since_s) == (GENRM, None, SlotStatus.SERVING, 7.0)


def test_a_refresh_keeps_the_time_since_which_it_has_its_role() -> None:
    slot = serving_slot()
    slot.begin_refresh()
    slot.finish(9.0)
    assert (slot.role, slot.since_s) == (ROLLOUT, 1.0)


REFUSED = {
    "commit with an engine awake": (lambda s: (s.begin_shift(GENRM), s.commit()), "commit refused: an engine"),
    "commit twice": (
        lambda s: (s.begin_shift(TRAIN), s.set_engine(ROLLOUT, ASLEEP), s.commit(), s.commit()),
        "commit refused: only a shift",
    ),
    "finish before the commit point": (lambda s: (s.begin_shift(GENRM), s.finish(2.0)), "finish refused: only a"),
    "finish with the new engine asleep": (
        lambda s: (s.begin_shift(GENRM), s.set_engine(ROLLOUT, ASLEEP), s.commit(), s.finish(2.0)),
        "finish refused: the genrm engine is asleep",
    ),
    "roll back without the old engine": (
        lambda s: (s.begin_shift(GENRM), s.set_engine(ROLLOUT, ASLEEP), s.roll_back(2.0)),
        "roll_back refused: the rollout engine is asleep",
    ),
    "roll back a refresh": (lambda s: (s.begin_refresh(), s.roll_back(2.0)), "roll_back refused"),
    "two engines with memory": (
        lambda s: (s.begin_shift(GENRM), s.set_engine(GENRM, UNSETTLED)),
        "the rollout engine holds its memory",
    ),
    "shift to its own role": (lambda s: s.begin_shift(ROLLOUT), "it has that role"),
    "shift twice": (lambda s: (s.begin_shift(GENRM), s.begin_shift(TRAIN)), "only a serving slot can shift"),
    "recover a healthy slot": (lambda s: s.recover(ROLLOUT), "only a failed slot recovers"),
    "recover while memory is held": (lambda s: (s.fail("x"), s.recover(ROLLOUT)), "an engine still holds memory"),
    "fail twice": (lambda s: (s.fail("first"), s.fail("second")), "failed (first)"),
    "wake outside a shift": (
        lambda s: (s.fail("x"), s.set_engine(ROLLOUT, AWAKE)),
        "rollout awake: the slot is not shifting",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_transition_is_refused_by_name(case: str) -> None:
    act, message = REFUSED[case]
    with pytest.raises(SlotError) as refused:
        act(serving_slot())
    assert message in str(refused.value)
    assert "slot 3 (" in str(refused.value)


def test_a_slot_refuses_roles_that_it_cannot_host() -> None:
    with pytest.raises(SlotError, match="it can host rollout"):
        serving_slot(can_host=frozenset({ROLLOUT})).begin_shift(GENRM)
    with pytest.raises(SlotError, match="its first role is train, but it can host only rollout"):
        Slot(0, TRAIN, {ROLLOUT})
    with pytest.raises(SlotError, match="only a serving engine"):
        serving_slot(TRAIN).begin_refresh()


def test_a_failed_slot_is_free_for_training_once_its_memory_is() -> None:
    slot = serving_slot()
    table = SlotTable([slot, Slot(4, ROLLOUT, {ROLLOUT})])
    assert table.blocking_training() == [slot]
    slot.fail("lost")
    assert not slot.is_free_for_training
    slot.set_engine(ROLLOUT, DEAD)
    assert slot.is_free_for_training
    assert table.blocking_training() == []


def test_the_table_names_what_is_missing_or_double() -> None:
    table = SlotTable([Slot(0, ROLLOUT, Role), Slot(2, TRAIN, Role)])
    with pytest.raises(SlotError, match=r"there is no slot 1; slots: \[0, 2\]"):
        table[1]
    with pytest.raises(SlotError, match="two slots have the id 0"):
        SlotTable([Slot(0, ROLLOUT, Role), Slot(0, TRAIN, Role)])
    assert [s.slot_id for s in table.hosting(GENRM)] == [0, 2]
    assert table.serving(TRAIN) == []


class SlotMachine(RuleBasedStateMachine):
    """Any sequence of calls, allowed or refused: a refusal changes nothing, and the state never contradicts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = Slot(0, ROLLOUT, Role)
        self.now_s = 0.0

    def attempt(self, call: str, *arguments: object) -> None:
        self.now_s += 1.0
        before = (self.slot.as_dict(), self.slot.committed, self.slot.epoch, self.slot.since_s)
        try:
            getattr(self.slot, call)(*arguments)
        except SlotError:
            assert before == (self.slot.as_dict(), self.slot.committed, self.slot.epoch, self.slot.since_s)

    @rule(role=st.sampled_from(Role))
    def begin_shift(self, role: Role) -> None:
        self.attempt("begin_shift", role)

    @rule(call=st.sampled_from(["begin_refresh", "commit"]))
    def plain(self, call: str) -> None:
        self.attempt(call)

    @rule(call=st.sampled_from(["finish", "roll_back"]))
    def timed(self, call: str) -> None:
        self.attempt(call, self.now_s)

    @rule()
    def fail(self) -> None:
        self.attempt("fail", "reason")

    @rule(role=st.sampled_from(Role))
    def recover(self, role: Role) -> None:
        self.attempt("recover", role)

    @precondition(lambda self: self.slot.status is not SlotStatus.SERVING)
    @rule(role=st.sampled_from(Role), state=st.sampled_from(EngineState))
    def set_engine(self, role: Role, state: EngineState) -> None:
        self.attempt("set_engine", role, state)

    @invariant()
    def consistent(self) -> None:
        self.slot.check()
        assert sum(not state.frees_memory for state in self.slot.engines.values()) <= 1
        if self.slot.is_serving(TRAIN):
            assert self.slot.memory_free
        if self.slot.status is SlotStatus.FAILED:
            assert AWAKE not in self.slot.engines.values()


SlotMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlotMachine = SlotMachine.TestCase
