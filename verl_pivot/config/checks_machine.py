"""Checks of the configuration against the machine: models, memory, Ray's resources, platform, proxies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address, ip_network

from verl_pivot.config.completion import Invocation
from verl_pivot.config.findings import Finding, error, warning
from verl_pivot.config.layout import total_gpus
from verl_pivot.config.machine import JUDGE_PATH, POLICY_PATH, STORE_DIRECTORY, ModelOnDisk
from verl_pivot.config.schema import MIN_CPU_SHARE
from verl_pivot.config.subject import Subject

_RS = "trainer.resource_shift"
_JUDGE = "reward.reward_model"
_CPU_GROUP = "+pivot_platform@_global_=cpu"
_NOT_CHOSEN = "verl picks its platform from the environment, and VERL_PLATFORM is not cpu"
_NUM_GPUS = "ray_kwargs.ray_init.num_gpus"


def models(subject: Subject) -> list[Finding]:
    """Local model folders exist and hold a model."""
    named = [(POLICY_PATH, subject.machine.policy)]
    if subject.get(f"{_JUDGE}.enable"):
        named.append((JUDGE_PATH, subject.machine.judge))
    return [finding for option, model in named if model is not None for finding in _model(option, model)]


def _model(option: str, model: ModelOnDisk) -> list[Finding]:
    if not model.is_local:
        return []
    if not model.exists:
        return [error(option, model.path, "there is no such folder", "give a folder with a model, or a hub name")]
    if not model.has_config:
        return [error(option, model.path, "has no config.json", "give a folder in Hugging Face format")]
    if model.weight_bytes is None:
        problem = "has no weights (*.safetensors or *.bin) that could be found"
        return [error(option, model.path, problem, "give a folder in Hugging Face format")]
    if option == JUDGE_PATH and not model.has_safetensors:
        problem = "has no *.safetensors, which is what the parameter store shares between judge engines"
        return [error(option, model.path, problem, "load it with transformers and save_pretrained it again")]
    return []


def models_text(subject: Subject) -> str:
    parts = []
    for who, model in (("policy", subject.machine.policy), ("judge", subject.machine.judge)):
        if model is not None:
            size = _gib(model.weight_bytes) if model.weight_bytes is not None else "size not known"
            parts.append(f"{who} {size}")
    return ", ".join(parts)


def store_bytes(subject: Subject) -> int | None:
    """Bytes the parameter store will hold on the driver's node: published versions, the one being written, and the
    judge. Sizes are those on disk, but for a policy that FSDP trains in fp32 and publishes so; None where one is not
    known."""
    policy = subject.machine.policy
    if policy is None or policy.weight_bytes is None:
        return None
    published = policy.weight_bytes * (2 if policy.is_16_bit and _trains_in_fp32(subject) else 1)
    total = (int(subject.get(f"{_RS}.store.keep_versions", 2)) + 1) * published
    if subject.get(f"{_JUDGE}.enable"):
        judge = subject.machine.judge
        if judge is None or judge.weight_bytes is None:
            return None
        total += judge.weight_bytes
    return total + int(subject.get(f"{_RS}.store.reserve_bytes", 0))


def _trains_in_fp32(subject: Subject) -> bool:
    actor = "actor_rollout_ref.actor"
    by_fsdp = str(subject.get(f"{actor}.strategy", "")).startswith("fsdp")
    return by_fsdp and subject.get(f"{actor}.fsdp_config.model_dtype") in ("fp32", "float32")


def store(subject: Subject) -> list[Finding]:
    """The store's directory is in memory and large enough."""
    directory = str(subject.get(STORE_DIRECTORY, ""))
    if not os.path.isabs(directory):
        problem = "must be an absolute path: weights are to be in memory, not below the working directory"
        way_out = f"set {STORE_DIRECTORY} to a folder of a tmpfs, such as /dev/shm/verl_pivot"
        return [error(STORE_DIRECTORY, directory, problem, way_out)]
    obstacle = subject.machine.store_obstacle
    if obstacle is not None:
        way_out = f"set {STORE_DIRECTORY} to a folder of a tmpfs that can be written to, such as /dev/shm/verl_pivot"
        return [error(STORE_DIRECTORY, directory, f"cannot be made: {obstacle}", way_out)]
    findings = []
    kind = subject.machine.store_filesystem
    if kind not in (None, "tmpfs", "ramfs"):
        problem = f"is on {kind}, not in memory: every shift would read weights from there"
        findings.append(warning(STORE_DIRECTORY, directory, problem, "use a folder of a tmpfs, such as /dev/shm"))
    needed, free = store_bytes(subject), subject.machine.store_free_bytes
    if needed is not None and free is not None and needed > free:
        keep = subject.get(f"{_RS}.store.keep_versions", 2)
        problem = f"needs {_gib(needed)} ({keep}+1 policy versions, judge, reserve) and {_gib(free)} are free"
        way_out = f"enlarge the tmpfs, lower {_RS}.store.keep_versions, or name another {STORE_DIRECTORY}"
        findings.append(error(STORE_DIRECTORY, directory, problem, way_out))
    return findings


def store_text(subject: Subject) -> str:
    needed, free = store_bytes(subject), subject.machine.store_free_bytes
    wanted = "size not known" if needed is None else f"needs {_gib(needed)}"
    return f"{wanted}, {_gib(free)} free" if free is not None else wanted


def ray_gpus(subject: Subject) -> list[Finding]:
    """Ray is told of at least as many GPUs as the pools ask for."""
    asked = total_gpus(subject.config)
    told = subject.get(_NUM_GPUS)
    if told is not None and int(told) < asked:
        problem = f"the pools ask for {asked} GPUs, Ray would have {told}"
        return [error(_NUM_GPUS, told, problem, f"set {_NUM_GPUS}={asked}, or ask for fewer GPUs")]
    if told is None and subject.on_cpu and "RAY_ADDRESS" not in subject.machine.environ:
        problem = f"on the CPU platform Ray must be told how many virtual GPUs to count; the pools ask for {asked}"
        return [error(_NUM_GPUS, None, problem, f"add {_CPU_GROUP}, or +{_NUM_GPUS}={asked}")]
    return []


def ray_text(subject: Subject) -> str:
    return f"{total_gpus(subject.config)} GPUs asked for"


def chosen_platform(environ: Mapping[str, str]) -> str:
    """The platform that the environment asks verl for; empty when it leaves the choice to verl."""
    return environ.get("VERL_PLATFORM", "").strip().lower()


def platform_not_chosen(invocation: Invocation, environ: Mapping[str, str]) -> list[Finding]:
    """The CPU group was asked for and the environment does not say so: verl has then set ``trainer.device`` to another
    platform's before anybody can check it, and every later finding would lead astray."""
    asked = (invocation.choices or {}).get("pivot_platform@_global_") == "cpu"
    if not asked or chosen_platform(environ) == "cpu":
        return []
    return [error(_CPU_GROUP, None, _NOT_CHOSEN, "start with VERL_PLATFORM=cpu in front of the same command")]


def platform(subject: Subject) -> list[Finding]:
    """Device and platform agree; CPU slots fit the cores."""
    chosen = chosen_platform(subject.machine.environ)
    device = subject.get("trainer.device")
    if subject.on_cpu and chosen != "cpu":
        return [error("trainer.device", device, _NOT_CHOSEN, "start with VERL_PLATFORM=cpu")]
    if chosen == "cpu" and not subject.on_cpu:
        problem = "VERL_PLATFORM=cpu is set, but training is to run on another device"
        return [error("trainer.device", device, problem, f"add {_CPU_GROUP}, or unset VERL_PLATFORM")]
    return _cpu_strategy(subject) + _cores(subject) if subject.on_cpu else []


def _cpu_strategy(subject: Subject) -> list[Finding]:
    option = "actor_rollout_ref.actor.strategy"
    strategy = subject.get(option)
    if strategy == "fsdp2":
        return []
    problem = "only FSDP2 trains on a CPU"
    return [error(option, strategy, problem, f"add {_CPU_GROUP}, or set {option}=fsdp2")]


def _cores(subject: Subject) -> list[Finding]:
    share = float(subject.get(f"{_RS}.slots.cpu_share", MIN_CPU_SHARE))
    if not MIN_CPU_SHARE <= share <= subject.machine.cores:
        problem = f"a slot can have from {MIN_CPU_SHARE} to {subject.machine.cores} cores of this machine"
        return [error(f"{_RS}.slots.cpu_share", share, problem, "use a share in between, such as 0.5")]
    slots = len(subject.layout.slots) if subject.layout is not None else 0
    wanted = share * slots
    if wanted > subject.machine.cores:
        problem = f"{slots} slots x {share} cores is more than the {subject.machine.cores} cores of this machine"
        way_out = f"use a share of at most {subject.machine.cores / slots:.2f}, or fewer slots"
        return [warning(f"{_RS}.slots.cpu_share", share, problem, way_out)]
    return []


def proxy(subject: Subject) -> list[Finding]:
    """Requests to the judge's router, which listens on this machine's own address, must not go through a proxy."""
    environ, address = subject.machine.environ, subject.machine.address
    through = environ.get("http_proxy") or environ.get("HTTP_PROXY")
    if not subject.get(f"{_JUDGE}.enable") or not through or address is None:
        return []
    excepted = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    if any(_covers(name.strip(), address) for name in excepted.split(",")):
        return []
    problem = (
        f"an HTTP proxy is set, and requests to the judge at {address} would go through it, unless the reward function "
        "ignores proxies as verl_pivot.judge does"
    )
    return [warning("no_proxy", environ.get("no_proxy"), problem, f"add {address} to no_proxy")]


def _covers(exception: str, address: str) -> bool:
    if exception in ("*", address):
        return True
    try:
        return ip_address(address) in ip_network(exception)
    except ValueError:  # a host name, or nothing
        return False


def _gib(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.1f} GiB"
