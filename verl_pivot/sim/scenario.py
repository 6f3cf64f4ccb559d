"""One simulated run's inputs: slots, what each can do in each role, workload, costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_pivot.core.bound import RolePeak
from verl_pivot.core.cost_book import CostBook, RoleCosts, TrainCost
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.workload import Workload


@dataclass(frozen=True)
class SimCosts:
    """Seconds of what is neither decoding nor prefill. Defaults: within the published ranges for 128 GPUs."""

    inference_shift_s: float = 3.0
    """Rollout to genrm or back: sleep (0.1-1.0), weights from host memory and wake (0.8-2.6)."""
    to_train_s: float = 12.0
    """Trainer wakes: optimizer state back on the GPU (published 10-15)."""
    from_train_s: float = 6.0
    """Trainer offloads, engine loads and wakes."""
    publish_s: float = 5.0
    """Weights from trainer to parameter store."""
    reload_s: float = 2.0
    """An awake rollout engine takes a new version."""
    feed_s: float = 0.0
    """From a publish until the prompts that it lets go ask for engines."""
    collect_s: float = 0.0
    """From the last answer of a batch that is waited for until the next phase has it."""
    measured_shift_s: Mapping[tuple[Role, Role], float] = field(default_factory=dict)
    """By (source, target), where it is known better."""

    def __post_init__(self) -> None:
        named = {name: value for name, value in vars(self).items() if isinstance(value, float | int)}
        named |= {f"measured_shift_s[{a}->{b}]": value for (a, b), value in self.measured_shift_s.items()}
        for name, value in named.items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"costs.{name} is {value}: it must be a number, 0 or more")

    @property
    def longest_s(self) -> float:
        """The longest of all."""
        values = [value for value in vars(self).values() if isinstance(value, float | int)]
        return max(*values, *self.measured_shift_s.values())

    def shift_s(self, source: Role, target: Role) -> float:
        if (source, target) in self.measured_shift_s:
            return self.measured_shift_s[source, target]
        if target is Role.TRAIN:
            return self.to_train_s
        return self.from_train_s if source is Role.TRAIN else self.inference_shift_s


@dataclass(frozen=True)
class Scenario:
    """A cluster with a policy, a judge and a workload. ``sim.cluster`` makes one of a cost file and model names."""

    title: str
    slots: int
    engines: Mapping[Role, RoleCosts]
    """All engines of an inference role on one slot, as one: they share its sequences evenly."""
    train: TrainCost
    workload: Workload
    costs: SimCosts = field(default_factory=SimCosts)
    staleness: int = 0
    seed: int = 0
    weight_bytes: int = 0
    """Of the policy; for the record only."""
    least_train_slots: int = 1
    """Slots whose memory holds the state of training."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}: it must be 1 or more")
        for name in ("staleness", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        longest = {
            Role.ROLLOUT: self.workload.prompt_tokens + self.workload.response.max_tokens,
            Role.GENRM: self.workload.judge_prompt_tokens_max + self.workload.judgement.max_tokens,
        }
        for role, tokens in longest.items():
            if self.engines[role].kv_tokens < tokens:
                raise ValueError(
                    f"the KV cache of a slot in {role} holds {self.engines[role].kv_tokens} tokens, fewer than the "
                    f"longest sequence has ({tokens}); use a larger tensor parallel size or a smaller maximum"
                )

    @classmethod
    def from_book(
        cls, title: str, book: CostBook, slots: int, workload: Workload, *, staleness: int = 0, seed: int = 0
    ) -> Scenario:
        """A cluster of ``slots`` slots like those that ``book`` was measured on. Pairs of roles that never shifted
        there cost what the slowest pair did."""
        slowest_s = max(book.shift_s.values(), default=0.0)
        costs = SimCosts(
            slowest_s,
            slowest_s,
            slowest_s,
            book.publish_s,
            book.reload_s,
            book.feed_s,
            book.collect_s,
            dict(book.shift_s),
        )
        return cls(title, slots, book.roles, book.train, workload, costs, staleness, seed)

    def update_s(self, tokens: float, slots: int) -> float:
        """One optimizer step over ``tokens`` prompt and response tokens on ``slots`` slots."""
        return self.train.update_s(tokens, slots)

    def peaks(self, context_tokens: Mapping[Role, float]) -> dict[Role, RolePeak]:
        """Best throughput of a slot in each inference role, at the mean context of its sequences."""
        return {
            role: RolePeak.of(
                spec.decode, context_tokens[role], spec.kv_tokens, spec.max_sequences, spec.prefill_s_per_token
            )
            for role, spec in self.engines.items()
        }
