"""A scenario from a cost file: two models on so many GPUs. What does not fit is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_pivot.core.cost_book import RoleCosts, TrainCost
from verl_pivot.core.costs import DecodeCost
from verl_pivot.core.snapshot import Role
from verl_pivot.sim.models import ACTIVATION_BYTES, MEMORY_SHARE, CostFile, Gpu, Model
from verl_pivot.sim.scenario import Scenario, SimCosts
from verl_pivot.sim.workload import Workload

TRAIN_BYTES_PER_PARAMETER = 16
"""Weights and gradients in bfloat16, master weights and two Adam moments in float32."""
FORWARD_PASSES = 1.0
"""Passes without gradient over each trained token, for its old log-probability: a third of an update each."""


@dataclass(frozen=True)
class Cluster:
    """GPUs, and the two models that share them."""

    policy: Model
    judge: Model
    gpu: Gpu
    gpus: int
    training_mfu: float
    max_sequences: int = 256
    """In the decode batch of one engine."""

    def __post_init__(self) -> None:
        for model in (self.policy, self.judge):
            if self.slot_gpus % model.tp:
                raise ValueError(f"{model.name}: tp {model.tp} does not divide the {self.slot_gpus} GPUs of a slot")
        if self.gpus < 1 or self.gpus % self.slot_gpus:
            raise ValueError(
                f"gpus is {self.gpus}: it must be a multiple of the GPUs of a slot, {self.slot_gpus} (the larger of "
                f"{self.policy.name} tp {self.policy.tp} and {self.judge.name} tp {self.judge.tp})"
            )

    @classmethod
    def of(cls, file: CostFile, policy: str, judge: str, gpus: int, gpu: str, max_sequences: int = 256) -> Cluster:
        """With the entries that ``file`` has for the models (the largest tensor parallel size of each)."""
        model = file.model(policy)
        return cls(model, file.model(judge), file.gpu(gpu), gpus, file.mfu(model), max_sequences)

    @property
    def slot_gpus(self) -> int:
        return max(self.policy.tp, self.judge.tp)

    def engine(self, model: Model) -> RoleCosts:
        """All engines of ``model`` on one slot as one."""
        engines = self.slot_gpus // model.tp
        return RoleCosts(
            slot_decode_cost(model.decode, engines),
            model.prefill_s_per_token(self.gpu) / engines,
            model.kv_tokens(self.gpu) * engines,
            self.max_sequences * engines,
        )

    def scenario(
        self, workload: Workload, *, costs: SimCosts | None = None, staleness: int = 0, seed: int = 0
    ) -> Scenario:
        flops = (6 + 2 * FORWARD_PASSES) * self.policy.active_parameters
        return Scenario(
            title=f"{self.policy.name} judged by {self.judge.name}, {self.gpus} x {self.gpu.name}",
            slots=self.gpus // self.slot_gpus,
            engines={Role.ROLLOUT: self.engine(self.policy), Role.GENRM: self.engine(self.judge)},
            train=TrainCost(flops / (self.slot_gpus * self.gpu.flops_per_s * self.training_mfu)),
            workload=workload,
            costs=costs or SimCosts(),
            staleness=staleness,
            seed=seed,
            weight_bytes=int(self.policy.weight_bytes),
            least_train_slots=self._least_train_slots(),
        )

    def _least_train_slots(self) -> int:
        """Raises ValueError when all GPUs together do not hold the state of training."""
        state_bytes = TRAIN_BYTES_PER_PARAMETER * self.policy.parameters
        slot_bytes = self.slot_gpus * (MEMORY_SHARE * self.gpu.memory_bytes - ACTIVATION_BYTES)
        least = math.ceil(state_bytes / slot_bytes)
        if least > self.gpus // self.slot_gpus:
            raise ValueError(
                f"gpus is {self.gpus}: training {self.policy.name} takes {state_bytes / 1e9:.0f} GB, which "
                f"{self.gpus} x {self.gpu.name} do not hold; use at least {least * self.slot_gpus} GPUs"
            )
        return least


def slot_decode_cost(cost: DecodeCost, engines: int) -> DecodeCost:
    """Decode cost of ``engines`` equal engines that share a slot's sequences evenly, as of one engine."""
    return DecodeCost(
        cost.floor_s, cost.base_s, cost.per_seq_s / engines, cost.attn_base_s, cost.attn_s_per_token / engines
    )
