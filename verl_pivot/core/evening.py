"""Evening out: a slot that arrives late finds its role's requests already inside the other engines.

Sequences stay where they began. A slot that comes back to a role in the middle of a batch would idle while the others
run full batches, each of their sequences slower for it. Pure; the controller carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verl_pivot.core.costs import DecodeCost

MIN_EXCESS = 2
MIN_EXCESS_SHARE = 0.25
"""Of an even share: less than that is left alone, it evens out by itself as requests end."""
MIN_SPEEDUP = 1.15
"""A decode step must become faster by this for the sequences that stay: where latency hardly depends on the batch,
moving sequences costs their prefill and brings nothing."""


@dataclass(frozen=True)
class Sequences:
    """What one running sequence of a role is like, on average."""

    context_tokens: float
    """That it holds."""
    left_tokens: float
    """That it will still generate; as many as it has so far is a fair guess."""
    prefill_s: float = 0.0
    """To compute it anew where it moves to."""
    lost_tokens: float = 0.0
    """That it has to generate again there."""


def excess(inflight: Mapping[int, int], cost: DecodeCost | None, each: Sequences) -> dict[int, int]:
    """Requests that each slot of one role should give up, so that those with fewer can take them.

    Args:
        inflight: requests at each serving slot of the role, none of them waiting before the engines.
        cost: decode cost of one engine; None: not known yet, nothing moves.

    Returns:
        slot id -> number; slots that keep all they have are absent.
    """
    if cost is None or len(inflight) < 2:
        return {}
    even = -(-sum(inflight.values()) // len(inflight))
    if not even:
        return {}

    def step_s(count: float) -> float:
        return cost.step_latency_s(count, count * each.context_tokens)

    moves = {
        slot_id: count - even
        for slot_id, count in inflight.items()
        if count - even >= max(MIN_EXCESS, MIN_EXCESS_SHARE * even) and step_s(count) >= MIN_SPEEDUP * step_s(even)
    }
    return moves if moves and _gain_s(inflight, moves, even, step_s, each) > 0 else {}


def _gain_s(
    inflight: Mapping[int, int], moves: Mapping[int, int], even: int, step_s: Callable[[float], float], each: Sequences
) -> float:
    """Seconds that all sequences together end earlier. Those that come to a slot are prefilled one after the other,
    and what runs there waits for it."""
    gain_s = sum(inflight[slot_id] * (step_s(inflight[slot_id]) - step_s(even)) for slot_id in moves) * each.left_tokens
    takers = [count for count in inflight.values() if count < even]
    share = sum(moves.values()) / sum(even - count for count in takers)
    for count in takers:
        come = (even - count) * share
        then_s = step_s(count + come)
        slower_s = count * (then_s - step_s(count)) + come * (then_s - step_s(even))
        gain_s -= slower_s * each.left_tokens + come * each.lost_tokens * then_s
        gain_s -= come * each.prefill_s * (count + come / 2)
    return gain_s
