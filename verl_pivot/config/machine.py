"""What the checks need to know about this machine, gathered once so that the checks themselves stay pure."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_pivot.config.files import NamedFile, folder_in_use, folder_obstacle, named_files
from verl_pivot.config.lookup import select

POLICY_PATH = "actor_rollout_ref.model.path"
JUDGE_PATH = "reward.reward_model.model_path"
STORE_DIRECTORY = "trainer.resource_shift.store.directory"
OBSERVE_DIRECTORY = "trainer.resource_shift.observe.directory"
EXPERIMENT_NAME = "trainer.experiment_name"
_ENVIRONMENT = ("VERL_PLATFORM", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "RAY_ADDRESS")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class ModelOnDisk:
    """A model path as given. One that looks like a hub name (``owner/name``) is not looked for."""

    path: str
    is_local: bool
    exists: bool
    has_config: bool
    weight_bytes: int | None
    """Bytes of all weights; None where they cannot be told."""
    has_safetensors: bool = True
    is_16_bit: bool = False
    """The model's configuration says that its weights are in 16 bits."""


@dataclass(frozen=True)
class Machine:
    """The driver's machine, as far as the checks look at it."""

    cores: int
    environ: Mapping[str, str] = field(default_factory=dict)
    store_free_bytes: int | None = None
    store_filesystem: str | None = None
    policy: ModelOnDisk | None = None
    judge: ModelOnDisk | None = None
    address: str | None = None
    """This machine's own address, at which the judge's router listens; None where it cannot be told."""
    can_draw: bool = True
    """matplotlib is installed."""
    files: tuple[NamedFile, ...] = ()
    """Files of this machine that options name."""
    observe_obstacle: str | None = None
    """Why a run's outputs cannot be written where they are to go."""
    run_folder_in_use: Path | None = None
    """Where the outputs are to go, when another run that goes on writes there."""
    store_obstacle: str | None = None
    """Why the parameter store cannot be made where it is to be."""


def look_at_machine(config: Mapping[str, Any]) -> Machine:
    """Read cores, environment, the store's file system and the sizes of the model files named by a plain config.

    Called in the driver before Ray starts, and by the doctor. Reads file metadata and the files of the reward code,
    never weights, and writes nothing.
    """
    directory = Path(str(select(config, STORE_DIRECTORY, "/dev/shm")))
    named = str(select(config, EXPERIMENT_NAME, ""))
    observed = (Path(str(select(config, OBSERVE_DIRECTORY, "."))) / named).absolute()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        environ={name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)},
        store_free_bytes=_free_bytes(directory),
        store_filesystem=filesystem_type(directory),
        policy=_model(select(config, POLICY_PATH)),
        judge=_model(select(config, JUDGE_PATH)),
        address=own_address(),
        can_draw=importlib.util.find_spec("matplotlib") is not None,
        files=tuple(named_files(config, os.environ)),
        observe_obstacle=folder_obstacle(observed, filesystem_type(observed)),
        run_folder_in_use=observed if folder_in_use(observed) else None,
        store_obstacle=folder_obstacle(directory.absolute(), filesystem_type(directory)),
    )


def own_address() -> str | None:
    """The address that packets to elsewhere would bear; no packet is sent. Ray's way, which names the router."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def filesystem_type(path: Path, mounts: str | None = None) -> str | None:
    """Type of the file system that holds ``path`` (``tmpfs``, ``ext4``, ...); None where it cannot be told."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return None
    resolved = str(path.resolve())
    best: tuple[int, str | None] = (-1, None)
    for line in mounts.splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ")
        inside = point == "/" or resolved == point or resolved.startswith(point + "/")
        # a later mount on the same point hides an earlier one
        if inside and len(point) >= best[0]:
            best = (len(point), parts[2])
    return best[1]


def _free_bytes(directory: Path) -> int | None:
    for candidate in (directory, *directory.parents):
        if candidate.exists():
            return shutil.disk_usage(candidate).free
    return None


def _model(path: str | None) -> ModelOnDisk | None:
    if not path:
        return None
    folder = Path(path).expanduser()
    # "owner/name" may be a hub name; anything else with a slash is meant as a path
    is_local = folder.exists() or path.startswith(("/", "~", ".")) or path.count("/") > 1
    if not folder.is_dir():
        return ModelOnDisk(path, is_local, False, False, None)
    return ModelOnDisk(
        path,
        is_local=True,
        exists=True,
        has_config=(folder / "config.json").is_file(),
        weight_bytes=_weight_bytes(folder),
        has_safetensors=any(folder.glob("*.safetensors*")),
        is_16_bit=_dtype(folder) in ("bfloat16", "float16"),
    )


def _dtype(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text())
        return str(config.get("dtype") or config.get("torch_dtype"))
    except (OSError, ValueError, AttributeError):
        return None


def _weight_bytes(folder: Path) -> int | None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError):
            return None
    for suffix in _WEIGHT_SUFFIXES:
        sizes = [file.stat().st_size for file in folder.glob(f"*{suffix}")]
        if sizes:
            return sum(sizes)
    return None
