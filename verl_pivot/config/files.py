"""Files and folders that a configuration names, looked at without importing or writing anything."""

from __future__ import annotations

import ast
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_pivot.config.lookup import select

REWARD_FUNCTION = "reward.custom_reward_function"
REWARD_MANAGER = "reward.reward_manager"
DATA_FILES = ("data.train_files", "data.val_files")
RUN_LOCK = ".lock"
"""File that a run keeps locked in the folder of its outputs."""
# their folders look writable to root, and nothing can be made in them
_PSEUDO_FILESYSTEMS = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "debugfs", "tracefs"})


@dataclass(frozen=True)
class NamedFile:
    """A file that an option names by a local path."""

    option: str
    path: str
    exists: bool
    names: frozenset[str] | None = None
    """Python files: names that the module defines; None where a look cannot tell."""
    broken: str | None = None
    """Python files: why Python cannot read it."""


def named_files(config: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[NamedFile]:
    """Python files and data files of a plain config that verl will open by a path of this machine."""
    ray_starts_elsewhere = "RAY_ADDRESS" in environ or select(config, "ray_kwargs.ray_init.runtime_env.working_dir")
    for option, path in _python_files(config):
        if os.path.isabs(path) or not ray_starts_elsewhere:
            yield _look_at_python(option, path)
    if select(config, "data.custom_cls.path"):
        return  # a dataset class of the user's own gives the values its own meaning
    for option in DATA_FILES:
        for path in _data_paths(select(config, option)):
            expanded = os.path.expanduser(path)
            if os.path.isabs(expanded) or not ray_starts_elsewhere:
                yield NamedFile(option, path, os.path.exists(expanded))


def _python_files(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """As ``load_module`` reads them (verl/utils/import_utils.py): a path, ``file://`` with a path, or a package."""
    options = [f"{REWARD_FUNCTION}.path"]
    if select(config, f"{REWARD_MANAGER}.source") == "importlib":
        options.append(f"{REWARD_MANAGER}.module.path")
    for option in options:
        path = str(select(config, option, "")).removeprefix("file://")
        if path and "://" not in path:
            yield option, path


def _look_at_python(option: str, path: str) -> NamedFile:
    if not os.path.isfile(path):
        return NamedFile(option, path, exists=False)
    if not path.endswith(".py"):
        return NamedFile(option, path, exists=True)
    try:
        module = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, OSError) as cause:
        return NamedFile(option, path, exists=True, broken=f"{type(cause).__name__}: {cause}")
    return NamedFile(option, path, exists=True, names=module_names(module))


def module_names(module: ast.Module) -> frozenset[str] | None:
    """Names that a module has after its import; None where they may come from elsewhere."""
    names: set[str] = set()
    for node in _module_scope(module.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).split(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id="globals" | "exec" | "setattr"):
                names.add("*")
    changed_from_within = any(isinstance(node, ast.Global) for node in ast.walk(module))
    return None if changed_from_within or names & {"*", "__getattr__"} else frozenset(names)


def _module_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes outside of functions and classes, these included."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_scope(ast.iter_child_nodes(node))


def _data_paths(value: Any) -> list[str]:
    """Local paths among the value of an option; URIs and patterns are for others to resolve."""
    values = value if isinstance(value, list) else [value]
    paths = [str(path) for path in values if path]
    return [path for path in paths if "://" not in path and not any(sign in path for sign in "*?[")]


def folder_obstacle(folder: Path, filesystem: str | None) -> str | None:
    """Why ``folder`` cannot be made or written to; None where nothing speaks against it. Makes nothing.

    Args:
        filesystem: type of the file system that holds it, where known.
    """
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    if filesystem in _PSEUDO_FILESYSTEMS:
        return f"{nearest} is on {filesystem}, where no folder can be made"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written to"
    return None


def folder_in_use(folder: Path, grace_s: float = 8.0) -> bool:
    """Whether a run that goes on writes to ``folder``: it keeps a file there locked. Makes nothing.

    The lock is asked for shared, so that two that look do not disturb each other, and let go at once. ``grace_s``: the
    processes of a run whose driver was killed need some seconds to end, and whoever resumes it is quick.
    """
    until_s = time.monotonic() + grace_s
    while is_locked := _is_locked(folder / RUN_LOCK):
        if time.monotonic() > until_s:
            break
        time.sleep(0.1)
    return is_locked


def _is_locked(path: Path) -> bool:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False  # nothing has run there
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(opened)
    return False
