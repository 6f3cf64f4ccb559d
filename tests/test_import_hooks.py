from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from verl_pivot.import_hooks import on_import, waiting

_numbers = itertools.count()


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module with the given source and returns its (unique) name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str = "value = 1\n") -> str:
        name = f"hooked_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return make


def recorder(log: list[str], tag: str) -> Callable[[ModuleType], None]:
    return lambda module: log.append(f"{tag}:{module.__name__}:{getattr(module, 'value', None)}")


def test_action_runs_once_after_the_module(make_module: Callable[..., str]) -> None:
    name, log = make_module(), []
    on_import(name, recorder(log, "a"))
    assert log == [] and name in waiting()
    importlib.import_module(name)
    importlib.import_module(name)
    importlib.reload(sys.modules[name])
    assert log == [f"a:{name}:1"]
    assert name not in waiting()


def test_action_runs_at_once_when_already_imported(make_module: Callable[..., str]) -> None:
    name, log = make_module(), []
    importlib.import_module(name)
    action = recorder(log, "a")
    on_import(name, action)
    on_import(name, action)
    assert log == [f"a:{name}:1"]


def test_several_actions_run_in_order_and_the_same_one_once(make_module: Callable[..., str]) -> None:
    name, log = make_module(), []
    first, second = recorder(log, "first"), recorder(log, "second")
    for action in (first, second, first):
        on_import(name, action)
    importlib.import_module(name)
    on_import(name, first)
    assert log == [f"first:{name}:1", f"second:{name}:1"]


def test_looking_for_a_module_uses_nothing_up(make_module: Callable[..., str]) -> None:
    name, log = make_module(), []
    on_import(name, recorder(log, "a"))
    assert importlib.util.find_spec(name) is not None
    assert importlib.util.find_spec(name) is not None
    assert log == []
    importlib.import_module(name)
    assert log == [f"a:{name}:1"]


def test_failed_import_keeps_the_action_for_the_next_attempt(make_module: Callable[..., str], tmp_path: Path) -> None:
    name, log = make_module("raise ValueError('first time')\n"), []
    on_import(name, recorder(log, "a"))
    with pytest.raises(ValueError, match="first time"):
        importlib.import_module(name)
    assert log == []
    (tmp_path / f"{name}.py").write_text("value = 22222222\n")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert log == [f"a:{name}:22222222"]


def test_exception_of_an_action_leaves_the_import(make_module: Callable[..., str]) -> None:
    name = make_module()

    def broken(_module: ModuleType) -> None:
        raise LookupError("no such hook")

    on_import(name, broken)
    with pytest.raises(LookupError, match="no such hook"):
        importlib.import_module(name)
    assert importlib.import_module(name).value == 1


def test_module_looks_untouched(make_module: Callable[..., str]) -> None:
    name = make_module("def f():\n    return 42\n\nloader_inside = __loader__\n")
    on_import(name, lambda module: None)
    module = importlib.import_module(name)
    assert inspect.getsource(module.f).startswith("def f()")
    assert module.__loader__ is module.__spec__.loader is module.loader_inside
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_half_imported_module_is_refused(make_module: Callable[..., str]) -> None:
    source = (
        "from verl_pivot.import_hooks import on_import\n"
        "try:\n"
        "    on_import(__name__, print)\n"
        "except RuntimeError as error:\n"
        "    value = str(error)\n"
    )
    module = importlib.import_module(make_module(source))
    assert "is being imported at this moment" in module.value


def test_an_action_may_import_the_hooked_module(make_module: Callable[..., str]) -> None:
    name, log = make_module(), []
    on_import(name, lambda module: log.append(importlib.import_module(name) is module))
    importlib.import_module(name)
    assert log == [True]
