"""Where the time of slots went: what was of use, and what stood between it and the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_pivot.core.bound import RolePeak
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.sim.engine import EngineCounts
from verl_pivot.sim.slots import SimSlots
from verl_pivot.sim.training import SimTrainer


@dataclass(frozen=True)
class Mark:
    """Counters at one instant."""

    at_s: float
    engines: Mapping[Role, EngineCounts]
    shifting_s: float
    update_s: float
    publish_s: float

    @classmethod
    def take(cls, now_s: float, slots: SimSlots, trainer: SimTrainer) -> Mark:
        spent = {"update": 0.0, "publish": 0.0}
        for name, start_s, end_s in trainer.spans:
            spent[name] += end_s - start_s
        totals = {role: slots.totals(role) for role in INFERENCE_ROLES}
        return cls(now_s, totals, slots.shifting_s, spent["update"], spent["publish"])


@dataclass(frozen=True)
class Ledger:
    """Shares of all slot-time between two marks; they add up to 1 with ``idle``."""

    decode: float
    """At peak rate: what the tokens would have taken in full batches."""
    small_batches: float
    """Decoding beyond that: batches that were not full, because of tails, imbalance, or too few sequences."""
    prefill: float
    recomputed: float
    """Prefill of what had been computed before: after migrations, new weights, preemptions."""
    reload: float
    """Engines that take new weights."""
    update: float
    publish: float
    shifting: float
    idle: float

    @classmethod
    def between(cls, first: Mark, last: Mark, slots: int, train_slots: int, peaks: Mapping[Role, RolePeak]) -> Ledger:
        total_s = slots * (last.at_s - first.at_s)
        spent = dict.fromkeys(("decode", "small_batches", "prefill", "recomputed", "reload"), 0.0)
        for role, peak in peaks.items():
            before, after = first.engines[role], last.engines[role]
            tokens = after.generated_tokens - before.generated_tokens
            again = after.recomputed_tokens - before.recomputed_tokens
            fresh = after.prefill_tokens - before.prefill_tokens - again
            ideal_s = tokens / peak.tokens_per_s
            spent["decode"] += ideal_s
            spent["small_batches"] += max(0.0, after.decode_s - before.decode_s - ideal_s)
            spent["prefill"] += fresh * peak.prefill_s_per_token
            spent["recomputed"] += again * peak.prefill_s_per_token
            spent["reload"] += after.paused_s - before.paused_s
        spent["update"] = train_slots * (last.update_s - first.update_s)
        spent["publish"] = train_slots * (last.publish_s - first.publish_s)
        spent["shifting"] = last.shifting_s - first.shifting_s
        shares = {name: seconds / total_s for name, seconds in spent.items()}
        return cls(**shares, idle=1 - sum(shares.values()))
