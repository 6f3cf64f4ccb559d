"""Source of verl, vLLM and this package, read without importing any of it. For the contract tests.

A file is named from its package on: ``verl/trainer/ppo/v1/trainer_base.py``. A name is dotted: ``PPOTrainer.fit``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache
def package_dir(package: str) -> Path:
    """Where ``package`` is installed; skips the test that asks when it is not."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def lines(file: str) -> list[str]:
    package, _, below = file.partition("/")
    return (package_dir(package) / below).read_text(encoding="utf-8").splitlines()


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse("\n".join(lines(file)))


def find(node: ast.AST, name: str) -> Definition | None:
    """The function or class ``name`` below a module or class; the last one where it is defined more than once."""
    found = None
    for part in name.split("."):
        same = [child for child in getattr(node, "body", []) if isinstance(child, Definition) and child.name == part]
        if not same:
            return None
        node = found = same[-1]
    return found


def function(file: str, name: str) -> Function:
    found = find(tree(file), name)
    assert isinstance(found, Function), f"{file} no longer has the function {name}"
    return found


def parameters(node: Function) -> list[str]:
    """Names of the parameters but ``self`` and ``cls``, those of a variable number with their stars."""
    arguments = node.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def names_in(node: ast.Module | ast.ClassDef) -> set[str]:
    """What a module or class binds, and what a class sets on ``self`` or looks up there with ``getattr``."""
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, Definition):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in statement.names)
        else:
            stored = [part for part in ast.walk(statement) if isinstance(part, ast.Name)]
            names.update(part.id for part in stored if isinstance(part.ctx, ast.Store))
    return names | set(_names_on_self(node)) if isinstance(node, ast.ClassDef) else names


def _names_on_self(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), ast.Constant(value=str(name)), *_]):
                yield name


def text_of(file: str, name: str) -> str:
    """Source text of the function or class ``name``, without its decorators."""
    found = find(tree(file), name)
    assert found is not None, f"{file} no longer has {name}"
    return "\n".join(lines(file)[found.lineno - 1 : found.end_lineno])


def our_nodes() -> Iterator[ast.AST]:
    """Every node of this package's own source."""
    root = package_dir("verl_pivot")
    for path in sorted(root.rglob("*.py")):
        yield from ast.walk(tree(f"verl_pivot/{path.relative_to(root)}"))


def imported_from(package: str) -> set[str]:
    """Names that this package imports from modules of ``package``."""
    imports = [node for node in our_nodes() if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name for node in imports if node.module.split(".")[0] == package for alias in node.names}
