"""Run an action once, right after a module is first imported.

``import verl`` happens in every process of a run. Registering there what belongs to the trainer, the engines or the
weights would import them all (seconds and hundreds of megabytes per process), so each registration waits until the
process imports the upstream module that it is about. Used by ``verl_pivot.plugin``, by the patches for the CPU
(``verl_ext.cpu_patches``, ``vllm_ext.cpu_patches``) and by ``vllm_ext.forkserver``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]

_waiting: dict[str, list[Action]] = {}
_done: set[tuple[str, Action]] = set()


def on_import(name: str, action: Action) -> None:
    """Call ``action(module)`` once, right after ``name`` has been executed, or now if that has happened already.

    Several actions of one module run in the order they were given; the same action given twice runs once. An
    exception from an action leaves the import statement that triggered it (and that action counts as done). An import
    that itself fails uses nothing up: the next attempt runs the actions.

    Raises RuntimeError when ``name`` is half-way through its own import: its contents are not there to act on, and
    it is too late to be told when they are.
    """
    if (name, action) in _done or action in _waiting.get(name, ()):
        return
    module = sys.modules.get(name)
    if module is None:
        _waiting.setdefault(name, []).append(action)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        return
    if getattr(module.__spec__, "_initializing", False):
        raise RuntimeError(f"cannot hook {name}: it is being imported at this moment; register the hook before it is")
    _done.add((name, action))
    action(module)


def waiting() -> tuple[str, ...]:
    """Names of the modules whose actions have not run (for tests)."""
    return tuple(name for name, actions in _waiting.items() if actions)


def _run_actions(name: str, module: ModuleType) -> None:
    actions = _waiting.get(name, [])
    while actions:
        action = actions.pop(0)
        _done.add((name, action))
        action(module)
    _waiting.pop(name, None)


class _ActionLoader(Loader):
    """The module's own loader, with the actions after ``exec_module``; it steps aside before the module's code runs."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = loader
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _run_actions(self._name, module)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)


class _HookFinder(MetaPathFinder):
    """Asks the other finders for a hooked module and puts ``_ActionLoader`` around the loader they name.

    The action is used up by the execution of the module, not here: ``importlib.util.find_spec`` must stay free of
    consequences.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _ActionLoader(spec.loader, fullname)
                return spec
        return None


_FINDER = _HookFinder()
