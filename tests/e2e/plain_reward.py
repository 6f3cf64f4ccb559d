"""A rule: verl alone, without a judge."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    return float(ground_truth in solution_str) + 0.01 * len(set(solution_str))
