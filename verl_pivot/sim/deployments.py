"""The deployments that are compared, as pools of slots and a planner: the same simulator runs all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from verl_pivot.core.snapshot import Role

ALL_ROLES = frozenset(Role)
INFERENCE = frozenset({Role.ROLLOUT, Role.GENRM})


class Deployment(StrEnum):
    """Names as tables and the command line show them."""

    COLOCATED = "colocated"
    """All roles take turns on all slots, in phases; staleness 0."""
    DISAGGREGATED = "disaggregated"
    """Three fixed pools."""
    ROLLOUT_REWARD_COLOCATED = "rollout_reward_colocated"
    """Training has its own slots; rollout and genrm take turns on the others; staleness 0."""
    TRAINER_POOL_ONLY = "trainer_pool_only"
    """Three pools; slots of training serve a fixed inference role while it has no use for them."""
    ENABLE_SWITCH = "enable_switch"
    """verl's rule: three pools; slots of training serve rollout until its batch is ready."""
    HARMONIC = "resource_shift"
    """Slots follow the published harmonic rule, as in a real run."""
    LOOKAHEAD = "resource_shift_lookahead"
    """Slots follow the look-ahead planner: ``trainer.resource_shift.planner.name=lookahead`` in a real run."""


@dataclass(frozen=True)
class Split:
    """Slots of each pool."""

    train: int
    rollout: int
    genrm: int

    @property
    def slots(self) -> int:
        return self.train + self.rollout + self.genrm

    def __str__(self) -> str:
        return f"{self.train}/{self.rollout}/{self.genrm}"


@dataclass(frozen=True)
class Layout:
    """How one deployment uses the slots of the cluster."""

    deployment: Deployment
    split: Split
    planner: str
    """Name in ``core.registry``."""
    first_role: tuple[Role, ...]
    """By slot."""
    can_host: tuple[frozenset[Role], ...]
    whole_steps: bool
    """Training waits for the whole step's batch, and the next step for training; else it takes mini-batches."""

    @property
    def train_slots(self) -> int:
        return sum(Role.TRAIN in roles for roles in self.can_host)


_PLANNERS: Mapping[Deployment, str] = {
    Deployment.COLOCATED: "phases",
    Deployment.DISAGGREGATED: "static",
    Deployment.ROLLOUT_REWARD_COLOCATED: "phases",
    Deployment.TRAINER_POOL_ONLY: "trainer_pool",
    Deployment.ENABLE_SWITCH: "enable_switch",
    Deployment.HARMONIC: "harmonic",
    Deployment.LOOKAHEAD: "lookahead",
}


def lay_out(deployment: Deployment, split: Split) -> Layout:
    """The layout of ``deployment`` over ``split``. Colocated uses all slots for everything and ignores the split."""
    planner = _PLANNERS[deployment]
    if deployment is Deployment.COLOCATED:
        return Layout(deployment, split, planner, (Role.ROLLOUT,) * split.slots, (ALL_ROLES,) * split.slots, True)
    hosts: dict[str, frozenset[Role]] = {"train": ALL_ROLES, "rollout": INFERENCE, "genrm": INFERENCE}
    lent = Role.ROLLOUT
    if deployment is Deployment.DISAGGREGATED:
        hosts = {role.value: frozenset({role}) for role in Role}
        lent = Role.TRAIN
    elif deployment is Deployment.ROLLOUT_REWARD_COLOCATED:
        hosts["train"], lent = frozenset({Role.TRAIN}), Role.TRAIN
    elif deployment is Deployment.TRAINER_POOL_ONLY:
        hosts |= {"rollout": frozenset({Role.ROLLOUT}), "genrm": frozenset({Role.GENRM})}
    elif deployment is Deployment.ENABLE_SWITCH:
        hosts = {role.value: frozenset({role}) for role in Role}
        hosts["train"] = frozenset({Role.TRAIN, Role.ROLLOUT})
    counts = {"train": split.train, "rollout": split.rollout, "genrm": split.genrm}
    begins = {"train": lent, "rollout": Role.ROLLOUT, "genrm": Role.GENRM}
    pools = [pool for pool, count in counts.items() for _ in range(count)]
    whole = deployment is Deployment.ROLLOUT_REWARD_COLOCATED
    first_role = [begins[pool] for pool in pools]
    if deployment is Deployment.TRAINER_POOL_ONLY:
        # Lent slots follow the sizes of the fixed pools.
        judges = round(split.train * split.genrm / max(1, split.rollout + split.genrm))
        first_role[:judges] = [Role.GENRM] * judges
    return Layout(deployment, split, planner, tuple(first_role), tuple(hosts[p] for p in pools), whole)
