"""What this package touches of verl is as it was written for: functions it subclasses, overrides, wraps or calls, with
their parameters; names it reads or sets on verl's objects; pieces of verl's code that it stands on.

All of it is read from source, without importing verl. That no import and no override is left out of the tables
(verl_symbols.py) is tested here too; calls and attributes are entered by hand. When an entry fails, verl moved
something: read the upstream change, adapt the module that uses it, then the table.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from upstream_source import Function, find, function, imported_from, names_in, our_nodes, parameters, text_of, tree
from verl_symbols import CLASSES, FRAGMENTS, FUNCTIONS

from verl_pivot.verl_ext.versions import VERL, installed_verl

pytestmark = pytest.mark.contract


def test_tested_release_is_the_pinned_one() -> None:
    assert installed_verl() == VERL


@pytest.mark.parametrize(("file", "name", "expected"), FUNCTIONS, ids=[name for _, name, _ in FUNCTIONS])
def test_function_takes_what_it_took(file: str, name: str, expected: str) -> None:
    assert parameters(function(f"verl/{file}", name)) == expected.split()


@pytest.mark.parametrize(("file", "name", "expected"), CLASSES, ids=[name or file for file, name, _ in CLASSES])
def test_class_has_what_we_use(file: str, name: str, expected: str) -> None:
    module = tree(f"verl/{file}")
    node = find(module, name) if name else module
    assert isinstance(node, ast.ClassDef | ast.Module), f"verl/{file} no longer has {name}"
    assert set(expected.split()) - names_in(node) == set()


@pytest.mark.parametrize(("file", "name", "piece"), FRAGMENTS, ids=[name for _, name, _ in FRAGMENTS])
def test_function_does_what_we_stand_on(file: str, name: str, piece: str) -> None:
    assert piece in text_of(f"verl/{file}", name)


# ---- what two pieces of code must have in common --------------------------------------------------------------------


def moves_of_weights(file: str, name: str) -> list[str]:
    """Calls of the actor's worker group, in the order of the source."""
    calls = [node for node in ast.walk(function(file, name)) if isinstance(node, ast.Call)]
    text = [ast.unparse(call) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]
    return [call for call in text if call.startswith("self.actor_rollout_wg.")]


def test_old_log_probs_are_computed_as_in_separate_async() -> None:
    theirs = moves_of_weights(
        "verl/trainer/ppo/v1/trainer_separate_async.py", "PPOTrainerSeparateAsync._compute_old_log_prob"
    )
    ours = moves_of_weights("verl_pivot/verl_ext/trainer.py", "PPOTrainerResourceShift._compute_old_log_prob")
    assert len(theirs) == 5
    assert ours == theirs


def test_the_control_plane_answers_what_verls_client_asks_its_balancer() -> None:
    client = text_of("verl/workers/rollout/llm_server.py", "LLMServerClient")
    asked = set(re.findall(r"_load_balancer\.(\w+)\.remote", client))
    assert {"acquire_server", "release_server"} <= asked
    for method in asked:
        theirs = function("verl/workers/rollout/router.py", f"GlobalRequestLoadBalancer.{method}")
        ours = function("verl_pivot/verl_ext/control_plane.py", f"ControlPlane.{method}")
        ours_only = ["resumes", "sequence"] if method == "acquire_server" else []  # asked for by require_acquire_fields
        assert parameters(ours) == [*parameters(theirs), *ours_only]


# ---- nothing is left out --------------------------------------------------------------------------------------------

ENTRIES = {name for _, name, _ in FUNCTIONS}
ENTRIES |= {f"{owner}.{name}" for _, owner, names in CLASSES for name in names.split()}
FILES = {name.split(".")[0] or Path(file).stem: file for file, name, _ in [*FUNCTIONS, *CLASSES]}


def test_every_import_has_an_entry() -> None:
    names = imported_from("verl")
    assert len(names) > 25
    assert names - FILES.keys() == set()


def ancestry(name: str) -> list[tuple[str, set[str]]]:
    """(class, its functions) for ``name`` and what it inherits from, as far as the tables know them."""
    node = find(tree(f"verl/{FILES[name]}"), name) if name in FILES else None
    if not isinstance(node, ast.ClassDef):
        return []
    functions = {child.name for child in node.body if isinstance(child, Function)}
    return [(name, functions), *(above for base in node.bases for above in ancestry(last_name(base)))]


def last_name(base: ast.expr) -> str:
    return ast.unparse(base).rsplit(".", 1)[-1]


def test_every_override_has_an_entry() -> None:
    overridden = set()
    for node in our_nodes():
        if isinstance(node, ast.ClassDef):
            above = [ancestor for base in node.bases for ancestor in ancestry(last_name(base))]
            for method in (child.name for child in node.body if isinstance(child, Function)):
                overridden.update([f"{name}.{method}" for name, functions in above if method in functions][:1])
    assert len(overridden) > 50
    assert overridden - ENTRIES == set()


# ---- the tests themselves can fail ----------------------------------------------------------------------------------


def test_what_moved_would_be_noticed() -> None:
    assert find(tree("verl/utils/config.py"), "validate_configuration") is None
    method = "  async def f(self, x, *, y=1, **kw):\n    self.c, self.d.e = getattr(self, 'h', x), self.g\n"
    moved = ast.parse(f"class A:\n  b: int\n{method}")
    changed, owner = find(moved, "A.f"), find(moved, "A")
    assert isinstance(changed, Function) and parameters(changed) == ["x", "y", "**kw"]
    assert isinstance(owner, ast.ClassDef) and names_in(owner) == {"b", "c", "f", "h"}
