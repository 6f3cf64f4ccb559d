from __future__ import annotations

import pytest

from verl_pivot.judge import boxed_number_parser, last_number_parser, verdict_parser


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("verdict: yes", 1.0),
        ("work: 1\nverdict: no", 0.0),
        ("Verdict:   YES.", 1.0),
        ("verdict:\nno", 0.0),
        ("verdict: yes ... on second thought, verdict: no", 0.0),
        ("verdict: no, wait. verdict: yes", 1.0),
        ("verdict: nothing", None),
        ("verdict: yesterday", None),
        ("my verdict: yes", 1.0),
        ("overdict: yes", None),
        ("verdict", None),
        ("", None),
    ],
)
def test_verdict_parser(text: str, score: float | None) -> None:
    assert verdict_parser(yes="verdict: yes", no="verdict: no")(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("it is correct", 2.0),
        ("it is not correct", -2.0),
        ("it is incorrect", None),
        ("not correct? no, correct", 2.0),
    ],
)
def test_a_verdict_inside_the_other_one_is_not_seen(text: str, score: float | None) -> None:
    assert verdict_parser(yes="correct", no="not correct", yes_score=2.0, no_score=-2.0)(text) == score


@pytest.mark.parametrize(
    ("text", "of_marks", "of_letters"),
    [
        ("answer✓", 1.0, None),
        ("✗", 0.0, None),
        ("[[A]]", None, 1.0),
        ("see [[B]].", None, 0.0),
        ("✗ although [[A]]", 0.0, 1.0),
        ("A", None, None),
    ],
)
def test_phrases_of_symbols(text: str, of_marks: float | None, of_letters: float | None) -> None:
    assert verdict_parser(yes="✓", no="✗")(text) == of_marks
    assert verdict_parser(yes="[[A]]", no="[[B]]")(text) == of_letters


@pytest.mark.parametrize(("yes", "no"), [("", "no"), ("yes", " "), ("Yes  sir", "yes sir")])
def test_verdicts_that_cannot_be_told_apart_are_refused(yes: str, no: str) -> None:
    with pytest.raises(ValueError, match="verdict_parser"):
        verdict_parser(yes=yes, no=no)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"so \boxed{7}", 7.0),
        (r"\boxed{3} no, \boxed{ 4.5 }", 4.5),
        (r"\boxed {.5}", 0.5),
        (r"\boxed{-1}", None),
        (r"\boxed{11}", None),
        (r"\boxed{seven}", None),
        (r"\boxed{7/10}", None),
        (r"\boxed{1e400}", None),
        (r"\boxed{}", None),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_boxed_number_parser(text: str, score: float | None) -> None:
    assert boxed_number_parser(low=0.0, high=10.0)(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("score: 7", 7.0),
        ("first 3, then 8.5.", 8.5),
        ("7 out of 100", 7.0),
        ("7/10", 7.0),
        ("-3", None),
        ("from 0-9", 9.0),
        ("v2 model", None),
        ("2nd", None),
        ("1e1", 10.0),
        ("none", None),
        ("", None),
    ],
)
def test_last_number_parser(text: str, score: float | None) -> None:
    assert last_number_parser(low=0.0, high=10.0)(text) == score


@pytest.mark.parametrize("make", [boxed_number_parser, last_number_parser])
def test_an_empty_range_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="low must be below high"):
        make(low=1.0, high=1.0)  # type: ignore[operator]
