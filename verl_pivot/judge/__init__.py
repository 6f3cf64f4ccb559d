"""A ready client for a generative reward model, for use inside a verl custom reward function."""

from verl_pivot.judge.client import JudgeClient, JudgeError, JudgeResult
from verl_pivot.judge.parsers import boxed_number_parser, last_number_parser, verdict_parser

__all__ = [
    "JudgeClient",
    "JudgeError",
    "JudgeResult",
    "boxed_number_parser",
    "last_number_parser",
    "verdict_parser",
]
