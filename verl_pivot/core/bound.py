"""The least time that a step can take: no GPU ever idle, every role as fast as its memory allows.

Defined once: the simulator, the benchmarks and the planner's reports compare with this and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_pivot.core.costs import DecodeCost
from verl_pivot.core.snapshot import Role


@dataclass(frozen=True)
class RolePeak:
    """The best that one slot does in an inference role."""

    tokens_per_s: float
    """Decoding, at the largest batch that memory and engine allow."""
    prefill_s_per_token: float
    step_latency_s: float
    """The shortest decode step: one sequence alone."""

    @classmethod
    def of(
        cls, cost: DecodeCost, context_tokens: float, kv_tokens: int, max_sequences: int, prefill_s_per_token: float
    ) -> RolePeak:
        """``context_tokens``: mean tokens that a running sequence holds. ``kv_tokens``: what the KV cache holds."""
        batch = max(1.0, min(float(max_sequences), kv_tokens / max(1.0, context_tokens)))
        return cls(cost.tokens_per_s(batch, batch * context_tokens), prefill_s_per_token, cost.step_latency_s(1, 0))


@dataclass(frozen=True)
class StepWork:
    """What one step has to do at least."""

    decode_tokens: Mapping[Role, float]
    prefill_tokens: Mapping[Role, float]
    train_slot_s: float
    """Seconds of updates times slots."""
    longest_chain_s: float = 0.0
    """Staleness 0 only: the longest response, its judgement and the update on all slots, one after the other."""


def bound_s(work: StepWork, peaks: Mapping[Role, RolePeak], slots: int) -> float:
    """Seconds that a step takes at least on ``slots`` slots: its work spread without gaps, and its longest chain.

    Raises ValueError for less than one slot.
    """
    if slots < 1:
        raise ValueError(f"slots is {slots}: it must be 1 or more")
    busy_s = work.train_slot_s
    for role, peak in peaks.items():
        busy_s += work.decode_tokens.get(role, 0.0) / peak.tokens_per_s
        busy_s += work.prefill_tokens.get(role, 0.0) * peak.prefill_s_per_token
    return max(busy_s / slots, work.longest_chain_s)
