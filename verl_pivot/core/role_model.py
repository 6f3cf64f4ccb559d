"""What a projection knows of one inference role: how fast a slot is, at any batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_pivot.core.backlog import Backlog
from verl_pivot.core.costs import DecodeCost

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class RoleModel:
    """One inference role on one slot."""

    decode: DecodeCost
    context_tokens: float
    """Mean tokens that a running sequence holds."""
    batch_limit: float
    """Sequences that a slot runs at a time."""
    prefill_s_per_token: float
    backlog: Backlog
    lost_tokens: float = 0.0
    """That a running sequence has to generate again when it is cut off."""

    @property
    def peak_tokens_per_s(self) -> float:
        """The most that a slot generates."""
        return self.decode.tokens_per_s(self.batch_limit, self.batch_limit * self.context_tokens)

    @property
    def load_per_sequence(self) -> float:
        """What a sequence adds to a decode step, over what the step takes without any."""
        cost = self.decode
        added_s = cost.per_seq_s + cost.attn_s_per_token * self.context_tokens
        return added_s / max(1e-9, max(cost.floor_s, cost.base_s) + cost.attn_base_s)

    @property
    def tail_s(self) -> float:
        """Until the longest sequence has ended, alone on a slot."""
        left = self.backlog.remaining_tokens
        return float(left[-1]) * self.decode.step_latency_s(1, self.context_tokens) if len(left) else 0.0

    def rate(self, sequences: Vector, slots: Vector) -> Vector:
        """Tokens a second that each of ``sequences`` sequences gets on ``slots`` slots; 0 where there is no slot."""
        batch = sequences / np.maximum(slots, 1e-9)
        running = np.clip(batch, 1.0, self.batch_limit)
        cost = self.decode
        linear_s = np.maximum(cost.floor_s, cost.base_s + cost.per_seq_s * running)
        latency_s = linear_s + cost.attn_base_s + cost.attn_s_per_token * running * self.context_tokens
        share = np.minimum(1.0, self.batch_limit / np.maximum(batch, 1e-9))
        return np.where(slots > 1e-6, share / latency_s, 0.0)

    def prefill_s(self, sequences: Vector) -> Vector:
        """Slot-seconds in which ``sequences`` running ones are prefilled anew."""
        return sequences * self.context_tokens * self.prefill_s_per_token

    def again_s(self, sequences: Vector) -> Vector:
        """Slot-seconds until ``sequences`` running ones that were cut off are where they were."""
        return self.prefill_s(sequences) + sequences * self.lost_tokens / self.peak_tokens_per_s
