"""Checks of switches: what must be on, what is not supported together with resource shifting."""

from __future__ import annotations

from typing import Any

from verl_pivot.config.findings import Finding, error, warning
from verl_pivot.config.schema import MIN_KV_CACHE_BYTES, MIN_SHARD_BYTES
from verl_pivot.config.subject import Subject

PLANNERS = ("harmonic", "lookahead", "static")
ENGINE_HOSTS = ("auto", "per_replica", "shared")
_RS = "trainer.resource_shift"
_ROLLOUT = "actor_rollout_ref.rollout"
_JUDGE = "reward.reward_model"
_ACTOR = "actor_rollout_ref.actor"


def trainer(subject: Subject) -> list[Finding]:
    """verl's v1 trainer, and nothing unknown below our mode's node."""
    findings = []
    if not subject.get("trainer.use_v1", True):
        problem = "resource shifting is a mode of verl's v1 trainer; the legacy trainer would ignore it"
        findings.append(error("trainer.use_v1", False, problem, "leave trainer.use_v1 at true"))
    for key, value in subject.get("trainer.v1.resource_shift", {}).items():
        if key != "parameter_sync_step":
            way_out = f"options of this mode are below {_RS}"
            findings.append(error(f"trainer.v1.resource_shift.{key}", value, "there is no such option", way_out))
    return findings


def one_node(subject: Subject) -> list[Finding]:
    """Weights are shared through the memory of one node."""
    pools = ["trainer.nnodes", f"{_ROLLOUT}.nnodes"]
    if subject.get(f"{_JUDGE}.enable") and subject.get(f"{_JUDGE}.enable_resource_pool"):
        pools.append(f"{_JUDGE}.nnodes")
    problem = "the parameter store shares weights through the memory of one node; several nodes are not supported yet"
    return [
        error(option, subject.get(option), problem, f"set {option}=1 and keep all pools on one node")
        for option in pools
        if int(subject.get(option, 0)) > 1
    ]


_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("distillation.enabled", False, "teacher models have engines of their own that no role covers"),
    (
        f"{_ROLLOUT}.disaggregation.enabled",
        False,
        "prefill and decode replicas cannot be shifted apart from each other",
    ),
    (f"{_JUDGE}.rollout.disaggregation.enabled", False, "prefill and decode replicas cannot be shifted apart"),
    ("trainer.v1.sampler.custom_sampler.path", None, "the trainer brings its own sampling"),
    (f"{_ROLLOUT}.agent.custom_async_server.path", None, "engines are served by this plugin"),
    ("trainer.v1.separate_async.hybrid_rollout.enable_switch", False, "verl's own switch moves the same GPUs"),
)
"""Option, the value it must keep, why."""


def unsupported(subject: Subject) -> list[Finding]:
    """Features that do not work together with resource shifting yet are refused, never half done."""
    findings = []
    engines = [(f"{_ROLLOUT}.name", subject.get(f"{_ROLLOUT}.name"))]
    if subject.get(f"{_JUDGE}.enable"):
        engines.append((f"{_JUDGE}.rollout.name", subject.get(f"{_JUDGE}.rollout.name")))
    for option, name in engines:
        if name != "vllm":
            problem = "only vLLM engines can be shifted" if name else "is not set, and only vLLM engines can be shifted"
            findings.append(error(option, name, problem, f"set {option}=vllm"))
    for option, wanted, why in _REFUSED:
        value = subject.get(option)
        if bool(value) != bool(wanted):
            shown = "null" if wanted is None else str(wanted).lower()
            findings.append(
                error(option, value, f"not supported with resource shifting: {why}", f"set {option}={shown}")
            )
    return findings + _lora(subject)


def _lora(subject: Subject) -> list[Finding]:
    """Adapters would reach the engines apart from the weights; merged ones are ordinary weights."""
    model = "actor_rollout_ref.model"
    if subject.get(f"{model}.lora.merge"):
        return []
    for option in (f"{model}.lora.rank", f"{model}.lora_rank", f"{model}.lora_adapter_path"):
        value = subject.get(option)
        if value:
            problem = "LoRA adapters are not kept in the parameter store"
            return [error(option, value, problem, f"train full weights, or set {model}.lora.merge=true")]
    return []


def planner(subject: Subject) -> list[Finding]:
    """Values of our own node that the types alone cannot rule out."""
    findings = []
    for option, known in ((f"{_RS}.planner.name", PLANNERS), (f"{_RS}.engine.host", ENGINE_HOSTS)):
        value = subject.get(option, known[0])
        if value not in known:
            findings.append(error(option, value, "is not known", f"choose one of {', '.join(known)}"))
    for option in _AT_LEAST_ZERO:
        value = subject.get(f"{_RS}.{option}", 0)
        if value < 0:
            findings.append(error(f"{_RS}.{option}", value, "must not be negative", "use 0 or more"))
    for option in _POSITIVE:
        value = subject.get(f"{_RS}.{option}", 1)
        if value <= 0:
            findings.append(error(f"{_RS}.{option}", value, "must be larger than 0", "leave it out for the default"))
    for option, least in _AT_LEAST_BYTES.items():
        value = subject.get(f"{_RS}.{option}", least)
        if value < least:
            problem = f"must be at least {least} bytes"
            findings.append(error(f"{_RS}.{option}", value, problem, "leave it out for the default"))
    for option, most in _AT_MOST.items():
        value = subject.get(f"{_RS}.{option}", most)
        if value > most:
            findings.append(error(f"{_RS}.{option}", value, f"must be at most {most}", "leave it out for the default"))
    return [*findings, *_combinations(subject)]


def _combinations(subject: Subject) -> list[Finding]:
    findings = []
    if subject.get(f"{_RS}.engine.host") == "shared" and not subject.on_cpu:
        problem = "engines of one process would all take the GPUs of the one that was made last"
        findings.append(error(f"{_RS}.engine.host", "shared", problem, "leave it at auto"))
    judges = subject.get(f"{_JUDGE}.enable") and not subject.get(f"{_JUDGE}.enable_resource_pool")
    if subject.get(f"{_RS}.planner.name") == "static" and judges:
        problem = "slots keep their first role, and without a pool of its own no slot begins as judge"
        way_out = f"set {_JUDGE}.enable_resource_pool=true with its nnodes and n_gpus_per_node, or use another planner"
        findings.append(error(f"{_RS}.planner.name", "static", problem, way_out))
    if subject.get(f"{_RS}.planner.name") == "lookahead":
        problem = "it predicts lengths and looks ahead; that it is faster was seen in simulations only"
        way_out = "compare with the default, harmonic, on your own workload (benchmarks/RESULTS.md has the simulations)"
        findings.append(warning(f"{_RS}.planner.name", "lookahead", problem, way_out))
    floors = sum(int(subject.get(f"{_RS}.planner.{role}_floor", 0)) for role in ("rollout", "genrm"))
    if subject.layout is not None and floors > len(subject.layout.slots):
        problem = f"floors ask for {floors} slots, there are {len(subject.layout.slots)}"
        findings.append(error(f"{_RS}.planner.rollout_floor + genrm_floor", floors, problem, "lower the floors"))
    return findings


_AT_LEAST_ZERO = (
    "staleness",
    "planner.margin",
    "planner.cooldown_s",
    "planner.immunity_s",
    "planner.rollout_floor",
    "planner.genrm_floor",
    "store.reserve_bytes",
)
_AT_LEAST_BYTES = {"store.shard_bytes": MIN_SHARD_BYTES, "engine.kv_cache_bytes": MIN_KV_CACHE_BYTES}
_AT_MOST = {"staleness": 1000, "train.poll_interval_s": 60.0}
"""Far above what could be meant."""
_POSITIVE = (
    "slots.cpu_share",
    "planner.interval_s",
    "planner.window_s",
    "shift.drain_s",
    "shift.sleep_s",
    "shift.load_s",
    "shift.wake_s",
    "shift.restart_s",
    "store.keep_versions",
    "judge.queue_deadline_s",
    "judge.request_deadline_s",
    "train.poll_interval_s",
    "train.lease_deadline_s",
    "engine.stats_interval_s",
)


def reward_model(subject: Subject) -> list[Finding]:
    """The judge: there is one, verl can ask it, and it has engines."""
    if not subject.get(f"{_JUDGE}.enable"):
        problem = "there is no generative reward model: slots will only move between rollout and train"
        return [warning(f"{_JUDGE}.enable", False, problem, f"set {_JUDGE}.enable=true to have responses judged")]
    findings = []
    if not subject.get(f"{_JUDGE}.model_path"):
        problem = "the reward model is enabled, but no model is named"
        findings.append(error(f"{_JUDGE}.model_path", None, problem, f"set {_JUDGE}.model_path"))
    if not subject.get("reward.custom_reward_function.path"):
        problem = "a generative reward model needs a reward function that writes its prompts and reads its verdicts"
        way_out = "set reward.custom_reward_function.path (and .name) to one that posts to reward_router_address"
        findings.append(error("reward.custom_reward_function.path", None, problem, way_out))
    nnodes = int(subject.get(f"{_JUDGE}.nnodes", 0))
    if subject.get(f"{_JUDGE}.enable_resource_pool") and nnodes < 1:
        problem = "the reward model's own pool has no node"
        way_out = f"set {_JUDGE}.nnodes, or {_JUDGE}.enable_resource_pool=false to judge on the shared slots"
        findings.append(error(f"{_JUDGE}.nnodes", nnodes, problem, way_out))
    return findings


def engine_memory(subject: Subject) -> list[Finding]:
    """On accelerators a slot changes role only if whoever leaves it gives its memory back."""
    if subject.on_cpu:
        return _cpu_sleep(subject)
    findings = []
    engines = [_ROLLOUT] + ([f"{_JUDGE}.rollout"] if subject.get(f"{_JUDGE}.enable") else [])
    for engine in engines:
        for switch in ("enable_sleep_mode", "free_cache_engine"):
            if not subject.get(f"{engine}.{switch}", True):
                problem = "engines that cannot sleep keep their memory, so their slot can never change role"
                findings.append(error(f"{engine}.{switch}", False, problem, f"set {engine}.{switch}=true"))
    strategy = subject.get(f"{_ACTOR}.strategy")
    offloads = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config"}.get(strategy, strategy)
    for switch in ("param_offload", "optimizer_offload"):
        option = f"{_ACTOR}.{offloads}.{switch}"
        if not subject.get(option, False):
            problem = "training GPUs are lent to rollout between updates, which needs the trainer's memory to be free"
            findings.append(error(option, False, problem, f"set {option}=true"))
    return findings


def _cpu_sleep(subject: Subject) -> list[Finding]:
    findings = []
    for engine in [_ROLLOUT] + ([f"{_JUDGE}.rollout"] if subject.get(f"{_JUDGE}.enable") else []):
        if subject.get(f"{engine}.enable_sleep_mode", True):
            problem = "vLLM refuses to start with its own sleep mode on a CPU (the plugin frees the memory by itself)"
            way_out = "add +pivot_platform@_global_=cpu, which sets all that a CPU needs"
            findings.append(error(f"{engine}.enable_sleep_mode", True, problem, way_out))
    return findings
