"""What is predicted of open sequences: the backlog of each role, and what stands between groups and training."""

from __future__ import annotations

import numpy as np
import pytest

from verl_pivot.core.forecast import REFRESH_S, Forecast, Observation, RoleForecast
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role

ROLLOUT, GENRM = Role.ROLLOUT, Role.GENRM
SIBLINGS = 4


def forecast(factor: float = 1.0) -> Forecast:
    return Forecast({r: RoleForecast(LengthPredictor(1000), SIBLINGS, 50.0, factor) for r in INFERENCE_ROLES})


def sequences(group: str, count: int, tokens: int = 1) -> list[Observation]:
    return [Observation(f"{group}-{at}", group, f"prompt {group}", 50, tokens) for at in range(count)]


def begun(open_now: dict[Role, list[Observation]], factor: float = 1.0) -> Forecast:
    made = forecast(factor)
    for role, observed in open_now.items():
        made.roles[role].begin(observed)
    made.look(open_now, lambda group: group == "due", now_s=0.0)
    return made


def test_nothing_open_is_nothing_left() -> None:
    made = begun({ROLLOUT: [], GENRM: []})
    assert made.groups.groups == 0
    assert all(made.backlog[role].sequences == 0 for role in INFERENCE_ROLES)
    assert len(made.backlog[ROLLOUT].new_tokens), "requests to come are known without any"


def test_every_open_sequence_counts_once() -> None:
    made = begun({ROLLOUT: sequences("a", 4) + sequences("b", 2), GENRM: sequences("c", 3)})
    assert made.backlog[ROLLOUT].sequences == pytest.approx(6)
    assert made.backlog[GENRM].sequences == pytest.approx(3)
    assert made.backlog[ROLLOUT].new_prompt_tokens == pytest.approx(50.0)


def test_a_group_waits_for_judgements_alone_once_no_response_is_open() -> None:
    made = begun({ROLLOUT: sequences("a", 4), GENRM: sequences("a", 2) + sequences("b", 1)})
    assert made.groups.groups == 2
    assert sorted(made.groups.rollout_tokens > 0) == [False, True], "negative: nothing is left of it in rollout"
    assert (made.groups.genrm_tokens > 0).all(), "judgements that have not begun count too"


def test_the_slowest_of_many_has_more_left_than_one() -> None:
    sizes = {}
    for members in (1, 4):
        groups = [one for group in range(50) for one in sequences(str(group), members)]
        sizes[members] = begun({ROLLOUT: groups, GENRM: []}).groups.rollout_tokens.mean()
    assert sizes[4] > 1.2 * sizes[1]


def test_due_groups_are_those_that_may_not_wait() -> None:
    groups = begun({ROLLOUT: sequences("late", 4), GENRM: sequences("due", 1)}).groups
    assert groups.due.tolist() == (groups.rollout_tokens < 0).tolist()


def test_what_ended_teaches_what_is_to_come() -> None:
    made = forecast()
    for group in range(20):
        made.roles[ROLLOUT].begin(sequences(str(group), SIBLINGS))
        for at in range(SIBLINGS):
            made.roles[ROLLOUT].end(f"{group}-{at}", 30)
    made.look({ROLLOUT: [], GENRM: []}, lambda group: False, now_s=0.0)
    assert made.backlog[ROLLOUT].new_mean_tokens == pytest.approx(30, rel=0.3)


def test_a_factor_makes_lengths_longer() -> None:
    right, wrong = (begun({ROLLOUT: sequences("a", 4), GENRM: []}, factor) for factor in (1.0, 2.0))
    assert wrong.backlog[ROLLOUT].tokens == pytest.approx(2 * right.backlog[ROLLOUT].tokens)
    assert np.allclose(wrong.groups.rollout_tokens, 2 * right.groups.rollout_tokens)


def test_it_looks_again_after_a_while() -> None:
    made = forecast()
    assert made.is_due(0.0)
    made.look({ROLLOUT: [], GENRM: []}, lambda group: False, now_s=0.0)
    assert not made.is_due(REFRESH_S / 2)
    assert made.is_due(REFRESH_S)


def test_requests_of_which_nothing_is_known_count_like_new_ones() -> None:
    made = forecast()
    made.look({ROLLOUT: [], GENRM: []}, lambda group: False, 0.0, unseen={ROLLOUT: 9, GENRM: 3})
    assert made.backlog[ROLLOUT].sequences == pytest.approx(9)
    assert made.backlog[ROLLOUT].tokens / 9 == pytest.approx(made.backlog[ROLLOUT].new_mean_tokens, rel=0.1)
    assert len(made.groups.rollout_tokens) == round(9 / SIBLINGS)


@pytest.mark.parametrize(("groups_open", "waiting"), [(0, 0), (1, 0), (2, 1), (4, 3), (9, 5)])
def test_judgements_of_unknown_groups_belong_to_groups_without_responses(groups_open: int, waiting: int) -> None:
    """One group still has responses open; at most each of five judgements is a group's last."""
    judgements = [Observation(f"j{at}", f"own {at}", f"own {at}", 50, 10 * at) for at in range(5)]
    made = forecast()
    made.roles[ROLLOUT].begin(sequences("a", 4))
    made.roles[GENRM].begin(judgements, siblings=1)
    open_now = {ROLLOUT: sequences("a", 4), GENRM: judgements}
    made.look(open_now, lambda group: False, 0.0, groups_open=groups_open)
    assert (made.groups.rollout_tokens < 0).sum() == waiting
    assert made.groups.due.sum() == waiting, "what has all its responses is due first"


def test_many_open_sequences_are_looked_at_less_often() -> None:
    made = Forecast({r: RoleForecast(LengthPredictor(1000), SIBLINGS) for r in INFERENCE_ROLES}, refresh_s=0.25)
    made.look({ROLLOUT: [], GENRM: []}, lambda group: False, now_s=0.0)
    assert made.is_due(0.25)
    many = [one for group in range(2000) for one in sequences(str(group), SIBLINGS)]
    made.roles[ROLLOUT].begin(many)
    made.look({ROLLOUT: many, GENRM: []}, lambda group: False, now_s=1.0)
    assert not made.is_due(2.5)
    assert made.is_due(3.0)


def test_the_mean_prompt_is_that_of_the_first_ones() -> None:
    role = RoleForecast(LengthPredictor(1000), SIBLINGS)
    role.begin([Observation("a", "g", "p", 40, 0), Observation("b", "g", "p", 60, 0)])
    assert role.prompt_tokens == pytest.approx(50.0)
