"""What a simulated run has to do: prompts, response lengths, judgement lengths. Seeded, or replayed from a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class LengthSpec:
    """Lengths in tokens: a lognormal, cut off at ``max_tokens``, of which a part is common to a prompt's responses.

    Raises ValueError that names the field when a value makes no sense.
    """

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm."""
    max_tokens: int
    correlation: float = 0.5
    """Within-prompt correlation of the logarithms, from 0 to 1."""
    growth: float = 1.0
    """Lengths at the end of the run over those at its start."""

    def __post_init__(self) -> None:
        if not 1 <= self.median_tokens <= self.max_tokens:
            raise ValueError(
                f"workload.median_tokens is {self.median_tokens}: it must be from 1 to max_tokens ({self.max_tokens})"
            )
        if not 0 <= self.sigma <= 4:
            raise ValueError(f"workload.sigma is {self.sigma}: it must be from 0 to 4")
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"workload.correlation is {self.correlation}: it must be from 0 to 1")
        if not (math.isfinite(self.growth) and self.growth > 0):
            raise ValueError(f"workload.growth is {self.growth}: it must be above 0")

    def draw(self, rng: np.random.Generator, effects: Vector, responses: int, progress: float = 0.0) -> Counts:
        """Lengths [prompts, responses] for prompts with standard normal ``effects`` [prompts], at ``progress`` (0 to
        1) through the run."""
        own = rng.standard_normal((len(effects), responses))
        shared = math.sqrt(self.correlation) * effects[:, None]
        logs = math.log(self.median_tokens) + progress * math.log(self.growth)
        tokens = np.exp(logs + self.sigma * (shared + math.sqrt(1 - self.correlation) * own))
        return np.asarray(np.clip(np.rint(tokens), 1, self.max_tokens), dtype=np.int64)


@dataclass(frozen=True)
class Workload:
    """What a step has to do."""

    response: LengthSpec
    judgement: LengthSpec
    prompts_per_step: int = 128
    responses_per_prompt: int = 16
    mini_batch_prompts: int = 32
    prompt_tokens: int = 512
    judge_template_tokens: int = 512
    """Tokens of a judge's prompt besides question and response."""
    judge_prompt_tokens_max: int = 16384
    distinct_prompts: int = 8192
    """Prompts of the data set; a run that is longer sees them again."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "responses_per_prompt", "mini_batch_prompts", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"workload.{name} is {getattr(self, name)}: it must be 1 or more")
        if self.prompts_per_step % self.mini_batch_prompts:
            raise ValueError(
                f"workload.prompts_per_step is {self.prompts_per_step}: it must be a multiple of mini_batch_prompts "
                f"({self.mini_batch_prompts})"
            )

    @property
    def mini_batches(self) -> int:
        return self.prompts_per_step // self.mini_batch_prompts
