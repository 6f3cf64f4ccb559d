"""Writes ``docs/configuration.md`` from the dataclasses of ``verl_pivot/config/schema.py`` and their docstrings.

    python docs/make_configuration.py

``tests/test_docs.py`` fails when the page is not what this would write.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from verl_pivot.config import schema
from verl_pivot.config.completion import derived_options
from verl_pivot.config.node import NODE

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/make_configuration.py from verl_pivot/config/schema.py: change that, then run it. -->

All options of the plugin are below `{node}`. An unknown key, a wrong type or an impossible value is an
error before Ray starts; there are no environment switches. `verl-pivot doctor [overrides]` makes the
same checks and starts nothing.

## The switch

| on the command line of `verl.trainer.main_ppo` | what it does |
|---|---|
| `+resource_shift@_global_=pivot` | on, every option at its default; change them with e.g. `{node}.staleness=1` |
| `+{node}.enable=true`, or `+{node}=true` | the same; further options then need a plus, `+{node}.staleness=1` |
| `+pivot_platform@_global_=cpu` | with `VERL_PLATFORM=cpu` in the environment: what verl needs to run on CPU cores |

To switch off, leave the override out; `enable=false` beside the group is refused.

Use the first form in scripts: it alone fails loudly where the plugin is not installed. `+resource_shift=pivot` (without
`@_global_`) is refused, since it would do nothing there.

## Where slots come from

GPUs are named with verl's own options, in three pools. Each pool is cut into slots, node by node.

| pool | GPUs | roles of its slots | first role |
|---|---|---|---|
| train | `trainer.nnodes` x `trainer.n_gpus_per_node` | train, rollout, genrm | rollout |
| rollout | `actor_rollout_ref.rollout.nnodes` x `.n_gpus_per_node` (0 nodes: no such pool) | rollout, genrm | rollout |
| genrm | `reward.reward_model.nnodes` x `.n_gpus_per_node` | rollout, genrm | genrm |

The genrm pool exists with `reward.reward_model.enable` and `reward.reward_model.enable_resource_pool`; a judge without
a pool of its own uses the slots of the other two. Parallel sizes of policy and judge must divide a slot, and a slot
must divide the GPUs of a pool on each node. All pools must be on one node for now: the parameter store is per node.

## Options
"""

DERIVED = """\
## Options of verl that follow

Set for you before Ray starts; giving one of them another value by hand is an error. Shown for staleness 0 and 1.

| option | staleness 0 | staleness 1 |
|---|---|---|
"""


@dataclass(frozen=True)
class Option:
    """One row: ``name`` is dotted and complete, ``section`` the docstring of the dataclass it is in."""

    name: str
    default: Any
    meaning: str
    section: str


def options(config: type = schema.ResourceShiftConfig, prefix: str = NODE) -> Iterator[Option]:
    """Every option below ``config``, a dataclass's own before those of its children.

    Raises ValueError for an option without a docstring.
    """
    meanings, hints, defaults = _field_docstrings(config), get_type_hints(config), config()
    section = _cell(inspect.cleandoc(config.__doc__ or ""))
    children = []
    for field in fields(config):
        name = f"{prefix}.{field.name}"
        if is_dataclass(hints[field.name]):
            children.append((hints[field.name], name))
            continue
        if field.name not in meanings:
            raise ValueError(f"{config.__name__}.{field.name} has no docstring under it")
        yield Option(name, getattr(defaults, field.name), meanings[field.name], section)
    for child, name in children:
        yield from options(child, name)


def _field_docstrings(config: type) -> dict[str, str]:
    """Field name -> the string that stands under it, on one line."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(statement.target, ast.Name) and isinstance(after.value, ast.Constant)
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


def render() -> str:
    """The whole page."""
    lines = [INTRODUCTION.format(node=NODE)]
    section = None
    for option in options():
        if option.section != section:
            section = option.section
            group = option.name.rsplit(".", 1)[0]
            lines += ([""] if lines[1:] else []) + [f"### `{group}`", "", section, ""]
            lines += ["| option | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{option.name.rsplit('.', 1)[1]}` | `{_shown(option.default)}` | {_cell(option.meaning)} |")
    lines += ["", DERIVED.rstrip("\n"), *_derived_rows()]
    return "\n".join(lines) + "\n"


def _derived_rows() -> Iterator[str]:
    on_policy, behind = (derived_options({**asdict(schema.ResourceShiftConfig()), "staleness": k}) for k in (0, 1))
    for option, value in on_policy.items():
        yield f"| `{option}` | `{_shown(value)}` | `{_shown(behind[option])}` |"


def _shown(value: Any) -> str:
    """As one would write it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
