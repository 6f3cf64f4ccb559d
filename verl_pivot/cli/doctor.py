"""``verl-pivot doctor``: the checks that a run makes before Ray starts. Imports neither verl nor Ray."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import traceback
from importlib import metadata
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_pivot.config.checks import CHECKS
from verl_pivot.config.checks_machine import chosen_platform
from verl_pivot.config.completion import Invocation, is_requested
from verl_pivot.config.findings import errors_of
from verl_pivot.config.node import RIGHT_FORM, misspelt_overrides
from verl_pivot.verl_ext.switch import Row, environment_rows, examine
from verl_pivot.verl_ext.versions import VERL

_PLUGIN = "verl_pivot.plugin"
_POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def run_doctor(overrides: list[str], config_name: str = "ppo_trainer", load: bool = False) -> int:
    """Print what was checked and found; returns the exit code: 1 when anything is wrong, else 0.

    Args:
        overrides: what would be given to ``python -m verl.trainer.main_ppo``; empty looks at the installation alone.
        load: import verl, so that failures of the plugin's parts show up.
    """
    console = Console()
    failures = plugin_failures(load)
    plugin_text = "loaded whole" if load else "installed; --load tries it"
    misspelt = misspelt_overrides(overrides)
    if misspelt:
        rows = [*environment_rows(failures, plugin_text), Row("switch", "", tuple(misspelt))]
        return _show(console, rows, complete=False)
    try:
        config, invocation = compose_verl_config(overrides, config_name)
    except (HydraException, OmegaConfBaseException, FileNotFoundError) as cause:
        hint = closest_option(str(cause), config_name)
        console.print(Text(f"The configuration cannot be composed: {cause}{hint}", style="red"), soft_wrap=True)
        return 1
    if is_requested(config, invocation):
        rows = examine(config, invocation, failures, plugin_text)
        return _show(console, rows, complete=len(rows) > len(CHECKS))
    off = Row("switch", f"off; {RIGHT_FORM} turns it on", ())
    return _show(console, [*environment_rows(failures, plugin_text), off])


def compose_verl_config(overrides: list[str], config_name: str) -> tuple[DictConfig, Invocation]:
    """verl's main configuration as ``main_ppo`` would get it, without importing verl.

    Raises FileNotFoundError when verl is not installed, and hydra's errors for overrides that do not compose.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"verl is not installed in this environment: this command reads verl's own configuration, from verl {VERL} "
            "(verl-pivot simulate works without)"
        )
    directory = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base=None, job_name="doctor"):
        config = compose(config_name, overrides=overrides, return_hydra_config=True)
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    assert isinstance(choices, dict)
    with open_dict(config):
        del config["hydra"]
    return config, Invocation(tuple(overrides), {str(group): choice for group, choice in choices.items()})


def closest_option(complaint: str, config_name: str) -> str:
    """What to add to hydra's complaint about an option that verl does not have: its advice, a plus, would make the
    option exist and have no effect. Empty for other complaints."""
    unknown = re.search(r"Could not override '([^']+)'", complaint)
    if unknown is None:
        return ""
    *parents, last = unknown.group(1).split(".")
    config, _ = compose_verl_config([], config_name)
    group = OmegaConf.select(config, ".".join(parents)) if parents else config
    siblings = [str(key) for key in group] if isinstance(group, DictConfig) else []
    near = difflib.get_close_matches(last, siblings, n=1)
    return (
        f"\n    -> did you mean {'.'.join([*parents, *near])}? A plus would add an option that nobody reads."
        if near
        else ""
    )


def plugin_failures(load: bool) -> dict[str, str]:
    """Why verl would not load the plugin, or (with ``load``) which of its parts do fail."""
    installed = [point for point in metadata.entry_points(group="verl.plugins") if point.value.startswith(_PLUGIN)]
    if not installed:
        return {"entry point": "verl-pivot is not installed as a package (pip install . in a clone of its repository)"}
    policy = os.environ.get(_POLICY, "auto").strip().lower()
    if policy != "auto" and installed[0].name not in {name.strip() for name in policy.split(",")}:
        return {"entry point": f"{_POLICY}={policy} keeps it out"}
    if not load:
        return {}
    try:
        importlib.import_module("verl")
        importlib.import_module("verl_pivot.verl_ext.trainer")
    except Exception as cause:
        vllm = installed()
        if vllm is not None and vllm.is_cpu_build and chosen_platform(os.environ) != "cpu":
            return {
                "trainer": "vLLM is its CPU build here, which is found with VERL_PLATFORM=cpu only: start with that"
            }
        traceback.print_exc()
        return {"trainer": f"import failed with {type(cause).__name__}: {cause}"}
    return dict(importlib.import_module(_PLUGIN).failures)


def _show(console: Console, rows: list[Row], complete: bool = True) -> int:
    """Print the table and below it every finding; returns the exit code. Not ``complete``: checks are missing."""
    console.print(table_of(rows))
    findings = [finding for row in rows for finding in row.findings]
    for finding in sorted(findings, key=lambda finding: finding.severity != "error"):
        text = Text(str(finding))
        text.stylize(_STYLES[finding.severity], 0, len(finding.severity))
        # not wrapped by us: an option or a way out that is broken into lines cannot be copied
        console.print(text, soft_wrap=True)
    if errors_of(findings) and not complete:
        console.print("Everything else is checked once this is right.")
    return 1 if errors_of(findings) else 0


_STYLES = {"error": "red", "warning": "yellow", "ok": "green"}


def table_of(rows: list[Row]) -> Table:
    """One line per check."""
    table = Table(box=box.SIMPLE_HEAD, title="verl-pivot doctor", title_justify="left", pad_edge=False)
    for column in ("check", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for row in rows:
        errors = len(errors_of(row.findings))
        status = "error" if errors else "warning" if row.findings else "ok"
        counts = ((errors, "error"), (len(row.findings) - errors, "warning"))
        found = ", ".join(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count)
        detail = f"{found}, see below" if found else row.text
        table.add_row(row.check, Text(status, style=_STYLES[status]), Text(detail))
    return table
