"""How the GPUs that verl was given are cut into slots. Pure functions over a plain config.

Three pools, all sized by verl's own options, become slots in this order:

    train     trainer.nnodes x trainer.n_gpus_per_node
    rollout   actor_rollout_ref.rollout.nnodes x .n_gpus_per_node       (0 nodes: no such pool)
    genrm     reward.reward_model.nnodes x .n_gpus_per_node             (with enable and enable_resource_pool)

Rollout and genrm slots are shared: they move between those two roles and start in the role of their pool. Train
slots start lent to rollout and come back whenever training takes its lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_pivot.config.findings import ConfigRefused, Finding, error
from verl_pivot.config.lookup import select

RoleName = Literal["train", "rollout", "genrm"]

_ROLLOUT = "actor_rollout_ref.rollout"
_JUDGE = "reward.reward_model"
_GPUS_PER_SLOT = "trainer.resource_shift.slots.gpus_per_slot"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class SlotSpec:
    """One slot before anything runs."""

    slot_id: int
    pool: RoleName
    """The pool its GPUs come from."""
    node: int
    """Index of the node inside its pool."""
    first_role: Literal["rollout", "genrm"]


@dataclass(frozen=True)
class Layout:
    """All slots of a run; ``slots[i].slot_id == i``, pools in the order train, rollout, genrm."""

    gpus_per_slot: int
    rollout_gpus: int
    """GPUs of one rollout replica (tensor x pipeline x data parallel)."""
    judge_gpus: int
    """GPUs of one judge replica; 0 without a judge."""
    slots: tuple[SlotSpec, ...]

    def of_pool(self, pool: RoleName) -> tuple[SlotSpec, ...]:
        return tuple(slot for slot in self.slots if slot.pool == pool)

    @property
    def train_slots(self) -> int:
        return len(self.of_pool("train"))

    @property
    def rollout_slots(self) -> int:
        return len(self.of_pool("rollout"))

    @property
    def genrm_slots(self) -> int:
        return len(self.of_pool("genrm"))

    @property
    def shared_slots(self) -> int:
        return self.rollout_slots + self.genrm_slots

    @property
    def rollout_replicas_per_slot(self) -> int:
        return self.gpus_per_slot // self.rollout_gpus

    @property
    def judge_replicas_per_slot(self) -> int:
        return self.gpus_per_slot // self.judge_gpus if self.judge_gpus else 0


@dataclass(frozen=True)
class _Pool:
    role: RoleName
    prefix: str
    """Where its options are."""
    nnodes: int
    gpus_per_node: int

    @property
    def option(self) -> str:
        return f"{self.prefix}.n_gpus_per_node"

    @property
    def gpus(self) -> int:
        return self.nnodes * self.gpus_per_node


def layout_from_config(config: Mapping[str, Any]) -> Layout:
    """Cut the pools of a completed plain config into slots.

    Raises ConfigRefused, naming every option that does not fit. Called by the check before Ray starts, by the doctor
    and by the trainer in its Ray actor.
    """
    findings = layout_findings(config)
    if findings:
        raise ConfigRefused(findings)
    gpus_per_slot = _gpus_per_slot(config)
    slots: list[SlotSpec] = []
    for pool in _pools(config):
        for node in range(pool.nnodes):
            for _ in range(pool.gpus_per_node // gpus_per_slot):
                first = "genrm" if pool.role == "genrm" else "rollout"
                slots.append(SlotSpec(len(slots), pool.role, node, first))  # type: ignore[arg-type]
    return Layout(gpus_per_slot, replica_gpus(config, _ROLLOUT), _judge_gpus(config), tuple(slots))


def layout_findings(config: Mapping[str, Any]) -> list[Finding]:
    """Everything that keeps ``layout_from_config`` from cutting slots."""
    findings = _size_findings(config) or _replica_findings(config)
    findings += _empty_pool_findings(config)
    pools = _pools(config)
    if not pools or pools[0].role != "train":
        value = f"{select(config, 'trainer.nnodes', 0)} x {select(config, 'trainer.n_gpus_per_node', 0)}"
        findings.append(
            error(
                "trainer.nnodes x trainer.n_gpus_per_node",
                value,
                "there is no GPU to train on",
                "set trainer.nnodes and trainer.n_gpus_per_node to at least 1",
            )
        )
    if not findings:
        findings = [found for pool in pools for found in _pool_findings(pool, config)]
    return findings


def replica_gpus(config: Mapping[str, Any], rollout: str) -> int:
    """GPUs of one inference replica: tensor x pipeline x data parallel size of the rollout config at ``rollout``."""
    product = 1
    for size in _SIZES:
        product *= int(select(config, f"{rollout}.{size}", 1))
    return product


def has_judge(config: Mapping[str, Any]) -> bool:
    return bool(select(config, f"{_JUDGE}.enable", False))


def total_gpus(config: Mapping[str, Any]) -> int:
    """GPUs that verl will ask Ray for."""
    return sum(pool.gpus for pool in _pools(config))


def _judge_gpus(config: Mapping[str, Any]) -> int:
    return replica_gpus(config, f"{_JUDGE}.rollout") if has_judge(config) else 0


def _gpus_per_slot(config: Mapping[str, Any]) -> int:
    asked = int(select(config, _GPUS_PER_SLOT, 0))
    return asked or max(replica_gpus(config, _ROLLOUT), _judge_gpus(config))


def _pools(config: Mapping[str, Any]) -> list[_Pool]:
    return [pool for pool in _named_pools(config) if pool.nnodes > 0 and pool.gpus_per_node > 0]


def _named_pools(config: Mapping[str, Any]) -> list[_Pool]:
    """Also those without a GPU."""
    prefixes: list[tuple[RoleName, str]] = [("train", "trainer"), ("rollout", _ROLLOUT)]
    if has_judge(config) and select(config, f"{_JUDGE}.enable_resource_pool", False):
        prefixes.append(("genrm", _JUDGE))
    pools = []
    for role, prefix in prefixes:
        nnodes, gpus_per_node = (int(select(config, f"{prefix}.{size}", 0)) for size in ("nnodes", "n_gpus_per_node"))
        pools.append(_Pool(role, prefix, nnodes, gpus_per_node))
    return pools


def _size_findings(config: Mapping[str, Any]) -> list[Finding]:
    """Parallel sizes that leave a replica without a GPU."""
    findings = []
    for rollout in [_ROLLOUT] + ([f"{_JUDGE}.rollout"] if has_judge(config) else []):
        for size in _SIZES:
            value = int(select(config, f"{rollout}.{size}", 1))
            if value < 1:
                way_out = f"set {rollout}.{size} to at least 1"
                findings.append(error(f"{rollout}.{size}", value, "a replica needs at least one GPU", way_out))
    return findings


def _replica_findings(config: Mapping[str, Any]) -> list[Finding]:
    asked = int(select(config, _GPUS_PER_SLOT, 0))
    if asked < 0:
        return [error(_GPUS_PER_SLOT, asked, "a slot cannot have fewer than one GPU", "use 0 to have it derived")]
    gpus_per_slot = _gpus_per_slot(config)
    replicas = [(f"{_ROLLOUT}.tensor_model_parallel_size", replica_gpus(config, _ROLLOUT), "rollout")]
    if has_judge(config):
        replicas.append((f"{_JUDGE}.rollout.tensor_model_parallel_size", _judge_gpus(config), "judge"))
    findings = []
    for option, gpus, who in replicas:
        if gpus > gpus_per_slot:
            problem = f"a {who} replica of {gpus} GPUs is larger than a slot of {gpus_per_slot}"
            findings.append(
                error(option, gpus, problem, f"set {_GPUS_PER_SLOT}={gpus} (or 0), or a smaller parallel size")
            )
        elif gpus_per_slot % gpus:
            rest = gpus_per_slot % gpus
            problem = f"replicas of {gpus} GPUs do not fill a slot of {gpus_per_slot}: {rest} GPU(s) would idle"
            way_out = (
                f"choose a parallel size that divides {gpus_per_slot}, or set {_GPUS_PER_SLOT} to a multiple of {gpus}"
            )
            findings.append(error(option, gpus, problem, way_out))
    return findings


def _empty_pool_findings(config: Mapping[str, Any]) -> list[Finding]:
    """Pools that are asked for and have no GPU: without a word their slots would be missing.

    A train pool without one is told of by itself, a genrm pool without a node with the reward model.
    """
    findings = []
    for pool in _named_pools(config):
        if pool.role == "rollout" and pool.nnodes < 0:
            way_out = "use 0 to have no such pool"
            findings.append(error(f"{pool.prefix}.nnodes", pool.nnodes, "there is no such number of nodes", way_out))
        elif pool.role != "train" and pool.nnodes > 0 and pool.gpus_per_node < 1:
            without = f"{pool.prefix}.nnodes=0" if pool.role == "rollout" else f"{_JUDGE}.enable_resource_pool=false"
            way_out = f"set {pool.option} to at least 1, or {without} to have no such pool"
            problem = f"the {pool.role} pool has {pool.nnodes} node(s) and no GPU"
            findings.append(error(pool.option, pool.gpus_per_node, problem, way_out))
    return findings


def _pool_findings(pool: _Pool, config: Mapping[str, Any]) -> list[Finding]:
    gpus_per_slot = _gpus_per_slot(config)
    if pool.gpus_per_node < gpus_per_slot:
        problem = f"a slot of {gpus_per_slot} GPUs does not fit on one node of the {pool.role} pool; "
        problem += "replicas that span nodes are not supported"
        way_out = f"give the node at least {gpus_per_slot} GPUs, or lower the parallel sizes or {_GPUS_PER_SLOT}"
        return [error(pool.option, pool.gpus_per_node, problem, way_out)]
    rest = pool.gpus_per_node % gpus_per_slot
    if rest:
        problem = (
            f"{rest} GPU(s) of each node of the {pool.role} pool would belong to no slot (slots have {gpus_per_slot})"
        )
        return [error(pool.option, pool.gpus_per_node, problem, f"use a multiple of {gpus_per_slot} GPUs a node")]
    return []
