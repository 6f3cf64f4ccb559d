"""Checks of batch sizes: prompts per step, mini-batches, micro-batches."""

from __future__ import annotations

import math

from verl_pivot.config.findings import Finding, error
from verl_pivot.config.subject import Subject

_TRAIN_BATCH = "data.train_batch_size"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_PER_STEP = "trainer.resource_shift.train.mini_batches_per_step"
_N = "actor_rollout_ref.rollout.n"


def batch(subject: Subject) -> list[Finding]:
    """Prompts per step against the mini-batch, and sequences against the training GPUs."""
    prompts = int(subject.get(_TRAIN_BATCH, 0))
    mini = int(subject.get(_MINI_BATCH, 0))
    per_step = int(subject.get(_PER_STEP, 1))
    if prompts < 1 or mini < 1:
        option, value = (_TRAIN_BATCH, prompts) if prompts < 1 else (_MINI_BATCH, mini)
        return [error(option, value, "must be at least 1", "give a number of prompts")]
    if per_step < 1:
        return [error(_PER_STEP, per_step, "must be at least 1", "use 1 to train on whole batches")]
    if per_step > 1 and prompts != per_step * mini:
        problem = f"a step trains on {per_step} mini-batches of {mini} prompts, which is {per_step * mini} prompts"
        return [error(_TRAIN_BATCH, prompts, problem, f"set {_TRAIN_BATCH}={per_step * mini}, or {_PER_STEP}=1")]
    if prompts % mini:
        problem = f"is not a multiple of {_MINI_BATCH}={mini}"
        return [error(_TRAIN_BATCH, prompts, problem, f"use a multiple of {mini}, such as {_nearest(prompts, mini)}")]
    return _divisible_by_gpus(subject, prompts, mini)


def _divisible_by_gpus(subject: Subject, prompts: int, mini: int) -> list[Finding]:
    n = int(subject.get(_N, 1))
    ranks = data_parallel_ranks(subject)
    findings = []
    for option, size in ((_TRAIN_BATCH, prompts), (_MINI_BATCH, mini)):
        if ranks and size * n % ranks:
            problem = f"{size} prompts x {n} responses cannot be shared by {ranks} data-parallel training ranks"
            findings.append(error(option, size, problem, f"make {option} x {_N} a multiple of {ranks}"))
    return findings


def batch_text(subject: Subject) -> str:
    per_step = subject.get(_PER_STEP, 1)
    return f"{subject.get(_TRAIN_BATCH)} prompts x {subject.get(_N, 1)} responses, {per_step} mini-batch(es) a step"


def micro_batches(subject: Subject) -> list[Finding]:
    """Micro-batches must divide what one rank gets of a mini-batch (verl/workers/engine/utils.py:125)."""
    ranks = data_parallel_ranks(subject)
    sequences = int(subject.get(_MINI_BATCH, 0)) * int(subject.get(_N, 1))
    if not ranks or sequences < 1 or sequences % ranks:
        return []
    per_rank = sequences // ranks
    actor, rollout, ref = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
    candidates = [
        (f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.use_dynamic_bsz"),
        (f"{rollout}.log_prob_micro_batch_size_per_gpu", f"{rollout}.log_prob_use_dynamic_bsz"),
    ]
    if subject.get(f"{actor}.use_kl_loss") or subject.get("algorithm.use_kl_in_reward"):
        candidates.append((f"{ref}.log_prob_micro_batch_size_per_gpu", f"{ref}.log_prob_use_dynamic_bsz"))
    findings = []
    for option, dynamic in candidates:
        micro = subject.get(option)
        if micro is None or subject.get(dynamic, False):
            continue
        if int(micro) < 1 or per_rank % int(micro):
            problem = f"does not divide the {per_rank} sequences that one rank gets of a mini-batch"
            findings.append(error(option, micro, problem, f"use a divisor of {per_rank}, or set {dynamic}=true"))
    return findings


def data_parallel_ranks(subject: Subject) -> int:
    """Training ranks that get different data; 0 where the sizes do not work out (said elsewhere, or by verl itself)."""
    gpus = int(subject.get("trainer.nnodes", 0)) * int(subject.get("trainer.n_gpus_per_node", 0))
    shared = math.prod(int(subject.get(option, 1)) for option in data_sharing_sizes(subject))
    return gpus // shared if gpus > 0 and shared > 0 and gpus % shared == 0 else 0


def data_sharing_sizes(subject: Subject) -> list[str]:
    """Options of the parallel sizes whose ranks train on the same data."""
    actor = "actor_rollout_ref.actor"
    if subject.get(f"{actor}.strategy") == "megatron":
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return [f"{actor}.megatron.{size}" for size in sizes]
    return [f"{actor}.ulysses_sequence_parallel_size"]


def _nearest(value: int, step: int) -> int:
    return max(step, round(value / step) * step)
