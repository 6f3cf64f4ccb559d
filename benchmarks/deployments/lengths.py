"""Imposed lengths: how many tokens each response and each judgement has, the same in every deployment.

Standard library only: runs inside agent loops and reward workers.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class LengthScheme:
    """Lognormal lengths, truncated above at ``max_tokens`` and below at ``min_tokens``.

    ``p50_tokens`` is the median before truncation; ``sigma`` the standard deviation of the logarithm, which makes the
    tail: 1.0 puts the 95th percentile at 5.2 times the median.
    """

    p50_tokens: float
    sigma: float
    max_tokens: int
    min_tokens: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.min_tokens <= self.p50_tokens <= self.max_tokens or self.sigma <= 0:
            raise ValueError(f"{self}: needs 0 < min_tokens <= p50_tokens <= max_tokens and a positive sigma")

    def tokens(self, *key: str | int) -> int:
        """Length of what ``key`` names, from ``min_tokens`` to ``max_tokens``; the same whenever and wherever asked."""
        return self._quantile(_uniform(self.seed, *key))

    def _quantile(self, u: float) -> int:
        log_length = NormalDist(math.log(self.p50_tokens), self.sigma)
        low, high = log_length.cdf(math.log(self.min_tokens)), log_length.cdf(math.log(self.max_tokens))
        length = math.exp(log_length.inv_cdf(low + u * (high - low)))
        return min(self.max_tokens, max(self.min_tokens, round(length)))


def _uniform(*key: str | int) -> float:
    """A number in the open interval (0, 1), from a hash of ``key``."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
