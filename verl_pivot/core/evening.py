"""Evening out: a slot that arrives late finds its role's requests already inside the other engines.

Sequences stay where they began. A slot that comes back to a role in the middle of a batch would idle while the others
run full batches, each of their sequences slower for it. Pure; the controller carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_pivot.core.costs import DecodeCost

MIN_EXCESS = 2
MIN_EXCESS_SHARE = 0.25
"""Of an even share: less than that is left alone, it evens out by itself as requests end."""
MIN_SPEEDUP = 1.15
"""A decode step must become faster by this for the sequences that stay: where latency hardly depends on the batch,
moving sequences costs their prefill and brings nothing."""


def excess(inflight: Mapping[int, int], cost: DecodeCost | None, context_tokens: float) -> dict[int, int]:
    """Requests that each slot of one role should give up, so that those with fewer can take them.

    Args:
        inflight: requests at each serving slot of the role, none of them waiting before the engines.
        cost: decode cost of one engine; None: not known yet, nothing moves.
        context_tokens: mean tokens that one running sequence holds.

    Returns:
        slot id -> number; slots that keep all they have are absent.
    """
    if cost is None or len(inflight) < 2:
        return {}
    even = -(-sum(inflight.values()) // len(inflight))
    if not even:
        return {}
    then_s = cost.step_latency_s(even, even * context_tokens)
    return {
        slot_id: count - even
        for slot_id, count in inflight.items()
        if count - even >= max(MIN_EXCESS, MIN_EXCESS_SHARE * even)
        and cost.step_latency_s(count, count * context_tokens) >= MIN_SPEEDUP * then_s
    }
