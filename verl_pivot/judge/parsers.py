"""From what a judge wrote to a number: each parser is ``str -> float | None``, and None means "no verdict in there".

Judges reason before they conclude and often name a verdict on the way, so the last match counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

ParseScore = Callable[[str], "float | None"]

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"


def verdict_parser(yes: str, no: str, yes_score: float = 1.0, no_score: float = 0.0) -> ParseScore:
    """Score by which of two phrases stands last in the text; letter case and width of white space do not matter.

    A phrase counts only as whole words: ``verdict: no`` is not found in ``verdict: nothing``.
    """
    if not yes.strip() or not no.strip():
        raise ValueError(f"verdict_parser: both phrases need words (yes={yes!r}, no={no!r})")
    if _squeeze(yes) == _squeeze(no):
        raise ValueError(f"verdict_parser: yes and no are the same phrase ({yes!r})")
    patterns = ((_phrase(yes), yes_score), (_phrase(no), no_score))

    def parse(text: str) -> float | None:
        # The longer match wins where both end at one place: "correct" inside "not correct" is no yes.
        found = [(m.end(), m.end() - m.start(), score) for pattern, score in patterns for m in pattern.finditer(text)]
        return max(found)[2] if found else None

    return parse


def boxed_number_parser(low: float = -math.inf, high: float = math.inf) -> ParseScore:
    r"""The number in the last ``\boxed{...}``; None when it holds no plain number or one outside [low, high]."""
    _check_range("boxed_number_parser", low, high)
    pattern = re.compile(r"\\boxed\s*\{([^{}]*)\}")

    def parse(text: str) -> float | None:
        boxes = pattern.findall(text)
        if not boxes or not re.fullmatch(_NUMBER, boxes[-1].strip()):
            return None
        return _within(float(boxes[-1]), low, high)

    return parse


def last_number_parser(low: float = -math.inf, high: float = math.inf) -> ParseScore:
    """The last number in the text that lies in [low, high]; numbers outside and the 10 of "7/10" are passed over."""
    _check_range("last_number_parser", low, high)
    pattern = re.compile(rf"(?<![\w./]){_NUMBER}(?!\w)")

    def parse(text: str) -> float | None:
        numbers = (_within(float(match), low, high) for match in reversed(pattern.findall(text)))
        return next((number for number in numbers if number is not None), None)

    return parse


def _squeeze(phrase: str) -> str:
    return " ".join(phrase.casefold().split())


def _phrase(phrase: str) -> re.Pattern[str]:
    phrase = phrase.strip()
    before = r"(?<!\w)" if re.match(r"\w", phrase) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", phrase) else ""
    words = r"\s+".join(map(re.escape, phrase.split()))
    return re.compile(before + words + after, re.IGNORECASE)


def _within(number: float, low: float, high: float) -> float | None:
    return number if math.isfinite(number) and low <= number <= high else None


def _check_range(name: str, low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"{name}: low must be below high (low={low}, high={high})")
