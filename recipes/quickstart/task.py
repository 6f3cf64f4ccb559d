"""The toy task: add a list of digits, in the open or by guessing, and judge such an answer.

A question is ``4+5+3=?``. Two ways of answering are worth telling apart::

    work: 9+3=12             adds the first two numbers again and again; nearly always right
    answer: 12

    answer: 15               a guess; nearly always wrong

The policy is shown both ways (and a few broken ones), so it starts out torn between them and has something to learn.
A judge sees question and response, adds the numbers itself and compares::

    work: 9+3=12
    claim: 15
    check: 1/1 ok 2/5 no
    verdict: no

Everything here is text and random numbers: no model, no tokenizer. Used by ``prepare.py`` in its own process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_RESPONSE_TOKENS = 128
"""Longest response worth rolling out; what rambles past it counts as unanswered. One character is one token."""

JUDGE_PROMPT = "response: {response}\nquestion: {question}"
"""What the judge is asked; ``reward.py`` asks with the same words. The question comes last, where a model that has
learned to add finds it as it is used to."""

LARGEST_TERM = 5
_TERM_COUNTS = (2, 3, 4, 5, 6, 7, 8)
_TERM_WEIGHTS = (15, 20, 20, 15, 12, 10, 8)
_LESSON_WEIGHTS = (5, 8, 15, 18, 18, 18, 18)
"""More of the long ones, which hold more additions for their length."""
_ANSWER = re.compile(r"(?:\A|\n)answer: (\d{1,2})\s*\Z")

SLIP_RATE = 0.04
"""Chance that one addition of a worked response is wrong."""
AGAIN_SHARE = 0.2
"""Chance that a worked response is written down twice, which makes it longer."""
WORKED_SHARE, GUESSED_SHARE = 0.55, 0.37
"""Shares of the two ways of answering; the rest is broken."""


@dataclass(frozen=True)
class Problem:
    """A list of digits to add."""

    terms: tuple[int, ...]

    @property
    def question(self) -> str:
        return "+".join(map(str, self.terms)) + "=?"

    @property
    def answer(self) -> int:
        return sum(self.terms)


def draw_problem(rng: random.Random, lesson: bool = False) -> Problem:
    """A problem of 2 to 8 digits, most of them short; for a ``lesson`` in adding, most of them long."""
    (count,) = rng.choices(_TERM_COUNTS, _LESSON_WEIGHTS if lesson else _TERM_WEIGHTS)
    return Problem(tuple(rng.randint(1, LARGEST_TERM) for _ in range(count)))


def claimed_answer(response: str) -> int | None:
    """The number on the last line ``answer: N``, or None when the response does not end with one."""
    match = _ANSWER.search(response)
    return int(match[1]) if match else None


def is_correct(problem: Problem, response: str) -> bool:
    return claimed_answer(response) == problem.answer


def addition_chain(terms: tuple[int, ...], add: Callable[[int, int], int] = lambda a, b: a + b) -> tuple[str, int]:
    """``(4, 5, 3)`` -> ``("9+3=12", 12)``: the first two numbers become their sum until one is left."""
    numbers, links = list(terms), []
    while len(numbers) > 1:
        numbers = [add(numbers[0], numbers[1]), *numbers[2:]]
        links.append("+".join(map(str, numbers)))
    return "=".join(links), numbers[0]


def draw_response(problem: Problem, rng: random.Random) -> str:
    """A response as the policy is first taught to give it: about half are right."""
    way = rng.random()
    if way < WORKED_SHARE:
        return worked_response(problem, rng, SLIP_RATE, AGAIN_SHARE)
    if way < WORKED_SHARE + GUESSED_SHARE:
        return guessed_response(problem, rng)
    return broken_response(problem, rng)


def worked_response(problem: Problem, rng: random.Random, slip_rate: float = 0.0, again_share: float = 0.0) -> str:
    """Adds step by step; each addition slips with ``slip_rate``. A share of short enough ones writes it down twice."""

    def add(a: int, b: int) -> int:
        slip = rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < slip_rate else 0
        return max(0, a + b + slip)

    chain, total = addition_chain(problem.terms, add)
    again = f"\nagain: {chain}" if rng.random() < again_share and 2 * len(chain) < MAX_RESPONSE_TOKENS - 40 else ""
    return f"work: {chain}{again}\nanswer: {total}"


def guessed_response(problem: Problem, rng: random.Random) -> str:
    """A number near the right one."""
    return f"answer: {max(0, problem.answer + rng.randint(-5, 5))}"


def broken_response(problem: Problem, rng: random.Random) -> str:
    """Stops early, says nothing of use, or rambles, sometimes for longer than a rollout may last."""
    chain, total = addition_chain(problem.terms)
    way = rng.randrange(4)
    if way == 0:
        return f"work: {chain[: rng.randint(1, len(chain))]}"
    if way == 1:
        return rng.choice(("answer: ?", "answer:", "no idea", f"answer: {problem.question[:-2]}"))
    rambling = f"work: {chain}" + f"={total}" * rng.randint(3, 40)
    return f"{rambling}\nanswer: {total}"[: MAX_RESPONSE_TOKENS + 20]


def judge_prompt(problem: Problem, response: str) -> str:
    return JUDGE_PROMPT.format(question=problem.question, response=response)


def judge_reply(problem: Problem, response: str) -> str:
    """What a faultless judge says about ``response``."""
    chain, total = addition_chain(problem.terms)
    return f"work: {chain}\n{_ruling(total, claimed_answer(response))}"


def _ruling(total: int, claim: int | None) -> str:
    """Compares digit by digit, each with its own small verdict: far easier to learn than yes or no at once."""
    if claim is None:
        return "claim: none\nverdict: no"
    digits = zip(f"{total:02d}", f"{claim:02d}", strict=True)
    check = " ".join(f"{ours}/{theirs} {'ok' if ours == theirs else 'no'}" for ours, theirs in digits)
    return f"claim: {claim}\ncheck: {check}\nverdict: {'yes' if claim == total else 'no'}"


def draw_comparison(rng: random.Random) -> tuple[str, str]:
    """The end of a judge's reply, cut after the claim, and what follows: comparing, the hard part, on its own."""
    problem = draw_problem(rng)
    total = problem.answer
    claim = rng.choice((total, total, _near_miss(total, rng), max(0, total + rng.randint(-5, 5))))
    start, rest = _ruling(total, claim).split("\n", 1)
    return f"{'=' if len(problem.terms) > 2 else 'work: '}{total}\n{start}\n", rest


def draw_candidate(problem: Problem, rng: random.Random) -> str:
    """A response for the judge to learn from: wider than what the policy says, so that learning does not outrun it.
    One that goes on for ever is cut off where the policy's would be."""
    return _any_candidate(problem, rng)[:MAX_RESPONSE_TOKENS]


def _any_candidate(problem: Problem, rng: random.Random) -> str:
    way = rng.random()
    if way < 0.30:
        return draw_response(problem, rng)
    if way < 0.50:
        return worked_response(problem, rng, 0.0, AGAIN_SHARE)
    if way < 0.70:
        return worked_response(problem, rng, 0.3, AGAIN_SHARE)  # the working convinces, and is wrong
    working = rng.choice(("", f"{worked_response(problem, rng)}\n", f"{worked_response(problem, rng, 0.3)}\n"))
    if way < 0.87:
        return f"{working}answer: {_near_miss(problem.answer, rng)}"
    return _damage(f"{working}answer: {problem.answer}", rng)


def _near_miss(total: int, rng: random.Random) -> int:
    """A wrong answer that looks right, or now and then the right one."""
    swapped = int(str(total)[::-1])
    wrong = (total + 1, total - 1, total + 10, total - 10, total + 2, swapped, total * 10, rng.randint(0, 99), total)
    return min(99, max(0, rng.choice(wrong)))


def _damage(text: str, rng: random.Random) -> str:
    """Cuts ``text`` short, or drops, doubles or replaces one character of it."""
    at = rng.randrange(len(text))
    way = rng.randrange(4)
    if way == 0:
        return text[:at]
    replacement = ("", text[at] * 2, rng.choice("0123456789+=?\n answerwok:"))[way - 1]
    return text[:at] + replacement + text[at + 1 :]
