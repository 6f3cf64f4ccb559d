"""Is resource shifting worth it for this configuration, at which staleness, with which split? By simulation.

Used by ``verl-pivot plan``. "Leave it off" is a possible answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_pivot.config.layout import has_judge, replica_gpus, total_gpus
from verl_pivot.config.lookup import select
from verl_pivot.sim.cluster import Cluster
from verl_pivot.sim.comparison import compare
from verl_pivot.sim.deployments import Deployment
from verl_pivot.sim.models import CostFile
from verl_pivot.sim.result import SimResult
from verl_pivot.sim.search import SHIFTING, best_of
from verl_pivot.sim.workload import LengthSpec, Workload

WORTH = 1.05
"""Throughput over the best without shifting from which it is worth the trouble."""
NODE_GPUS = 8
"""Of one node, when the best split is turned into options."""
COMPARED = (
    Deployment.DISAGGREGATED,
    Deployment.ENABLE_SWITCH,
    Deployment.HARMONIC,
    Deployment.LOOKAHEAD,
)
_PLANNERS = {Deployment.HARMONIC: "harmonic", Deployment.LOOKAHEAD: "lookahead"}
_SIGMA, _CORRELATION = 0.9, 0.5
_ROLLOUT, _JUDGE = "actor_rollout_ref.rollout", "reward.reward_model.rollout"


_NOISE = 0.02
"""By which the planner that is not the default must be better to be recommended."""


def _trusted(result: SimResult) -> float:
    return result.tokens_per_s * (1 - _NOISE if result.deployment is Deployment.LOOKAHEAD else 1)


@dataclass(frozen=True)
class Question:
    """What is asked about."""

    cluster: Cluster
    workload: Workload


@dataclass(frozen=True)
class Answer:
    """What was found, by staleness in the order asked."""

    results: Mapping[int, Sequence[SimResult]]
    best: SimResult
    """The fastest run with resource shifting."""
    rival: SimResult
    """The fastest without, at a staleness no higher."""

    @property
    def gain(self) -> float:
        return self.best.tokens_per_s / self.rival.tokens_per_s

    @property
    def is_worth_it(self) -> bool:
        return self.gain >= WORTH

    def words(self) -> str:
        """The verdict in a sentence."""
        rival = f"{self.rival.deployment} ({self.rival.split})"
        if self.is_worth_it:
            return (
                f"Worth it: resource_shift with the {_PLANNERS[self.best.deployment]} planner, staleness "
                f"{self.best.staleness} and slots {self.best.split} (train/rollout/genrm) makes {self.gain:.2f} times "
                f"the tokens of {rival}, the best without."
            )
        return (
            f"Leave it off: {rival} at staleness {self.rival.staleness} does as well; shifting makes {self.gain:.2f} "
            f"times as many tokens at most, and is advised from {WORTH:.2f} on."
        )

    def overrides(self, slot_gpus: int) -> list[str]:
        """Options of verl that set the best run with resource shifting; slots have ``slot_gpus`` GPUs."""
        split, shift = self.best.split, "trainer.resource_shift"
        pools = {
            "trainer": split.train,
            "actor_rollout_ref.rollout": split.rollout,
            "reward.reward_model": split.genrm,
        }
        options = [
            "+resource_shift@_global_=pivot",
            f"{shift}.planner.name={_PLANNERS[self.best.deployment]}",
            f"{shift}.staleness={self.best.staleness}",
            f"{shift}.slots.gpus_per_slot={slot_gpus}",
        ]
        for pool, slots in pools.items():
            gpus = slots * slot_gpus
            nodes = -(-gpus // NODE_GPUS)
            options += [f"{pool}.nnodes={nodes}", f"{pool}.n_gpus_per_node={-(-gpus // nodes)}"]
        return options


def question_of(
    config: Mapping[str, Any],
    file: CostFile,
    gpu: str,
    *,
    policy: str | None,
    judge: str | None,
    response_median: float | None,
    judge_median: float | None,
) -> Question:
    """From verl's composed configuration; names and medians where given, else what the configuration says.

    Raises ValueError that names the option when something is missing or unknown.
    """
    if not has_judge(config):
        raise ValueError("reward.reward_model.enable is not true: without a generative judge there is nothing to plan")
    models = [
        file.model(_name(config, option, file, given), replica_gpus(config, engines))
        for option, given, engines in (
            ("actor_rollout_ref.model.path", policy, _ROLLOUT),
            ("reward.reward_model.model_path", judge, _JUDGE),
        )
    ]
    cluster = Cluster(models[0], models[1], file.gpu(gpu), total_gpus(config), file.mfu(models[0]))
    return Question(cluster, _workload(config, response_median, judge_median))


def _name(config: Mapping[str, Any], option: str, file: CostFile, given: str | None) -> str:
    """The longest name in the cost file that the model's path holds."""
    if given is not None:
        return given
    path = str(select(config, option, ""))
    known = sorted({model.name for model in file.models}, key=len, reverse=True)
    for name in known:
        if name.lower() in path.lower():
            return name
    kind = "policy" if option.startswith("actor") else "judge"
    raise ValueError(
        f"{option} is {path or 'not set'}: the cost file has no model of that name; give --{kind} one of "
        f"{', '.join(sorted(known))}, or --costs with a file that has it"
    )


def _workload(config: Mapping[str, Any], response_median: float | None, judge_median: float | None) -> Workload:
    response_max = int(
        select(config, "data.max_response_length", 0) or select(config, f"{_ROLLOUT}.response_length", 0)
    )
    judge_max = int(select(config, f"{_JUDGE}.response_length", 0) or 2048)
    if response_max < 1:
        raise ValueError("data.max_response_length is not set: it says how long responses can get")
    prompts = int(select(config, "data.train_batch_size", 0))
    mini = int(select(config, "actor_rollout_ref.actor.ppo_mini_batch_size", prompts))
    if mini < 1 or prompts % mini:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size is {mini}: it must divide data.train_batch_size, {prompts}"
        )
    return Workload(
        LengthSpec(response_median or response_max / 5, _SIGMA, response_max, _CORRELATION),
        LengthSpec(judge_median or judge_max / 5, _SIGMA, judge_max, _CORRELATION / 2),
        prompts_per_step=prompts,
        responses_per_prompt=int(select(config, f"{_ROLLOUT}.n", 1)),
        mini_batch_prompts=mini,
        prompt_tokens=max(1, int(select(config, "data.max_prompt_length", 1024)) // 2),
        judge_prompt_tokens_max=int(select(config, f"{_JUDGE}.prompt_length", 0) or response_max + 2048),
    )


def answer(
    question: Question,
    stalenesses: Sequence[int],
    *,
    tries: int,
    steps: int,
    seed: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Answer:
    """Simulate every deployment at its best split under each staleness, and colocated. ``on_run``: see ``compare``."""
    results: dict[int, list[SimResult]] = {}
    for staleness in sorted({0, *stalenesses}):
        # Colocated is always synchronous: it is simulated once.
        asked = COMPARED if staleness else (Deployment.COLOCATED, *COMPARED)
        scenario = question.cluster.scenario(question.workload, staleness=staleness, seed=seed)
        if staleness in stalenesses:
            results[staleness] = compare(scenario, steps=steps, tries=tries, deployments=asked, on_run=on_run)
        else:
            results[staleness] = [best_of(scenario, Deployment.COLOCATED, steps, tries)]
    every = [result for found in results.values() for result in found]
    best = max((r for r in every if r.deployment in SHIFTING), key=_trusted)
    others = [r for r in every if r.deployment not in SHIFTING and r.staleness <= best.staleness]
    return Answer(results, best, max(others, key=lambda r: r.tokens_per_s))
