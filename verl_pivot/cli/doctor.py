"""``verl-pivot doctor``: the checks that a run makes before Ray starts, as a table. Imports neither verl nor Ray."""

from __future__ import annotations

import importlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_pivot.config.completion import RIGHT_FORM, Invocation, is_requested
from verl_pivot.config.findings import errors_of
from verl_pivot.verl_ext.switch import Row, environment_rows, examine

_PLUGIN = "verl_pivot.plugin"
_POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def run_doctor(overrides: list[str], config_name: str = "ppo_trainer", load: bool = False) -> int:
    """Print the table; returns the exit code: 1 when anything is wrong, else 0.

    Args:
        overrides: what would be given to ``python -m verl.trainer.main_ppo``; empty looks at the installation alone.
        load: import verl, so that failures of the plugin's parts show up.
    """
    console = Console(width=None if Console().is_terminal else 140)
    failures = plugin_failures(load)
    try:
        config, invocation = compose_verl_config(overrides, config_name)
    except (HydraException, OmegaConfBaseException, FileNotFoundError) as cause:
        console.print(Text(f"The configuration cannot be composed: {cause}", style="red"))
        return 1
    plugin_text = "loaded whole" if load else "installed; --load tries it"
    if is_requested(config, invocation):
        rows = examine(config, invocation, failures, plugin_text)
    else:
        rows = [*environment_rows(failures, plugin_text), Row("switch", f"off; {RIGHT_FORM} turns it on", ())]
    console.print(table_of(rows))
    return 1 if errors_of(finding for row in rows for finding in row.findings) else 0


def compose_verl_config(overrides: list[str], config_name: str) -> tuple[DictConfig, Invocation]:
    """verl's main configuration as ``main_ppo`` would get it, without importing verl.

    Raises FileNotFoundError when verl is not installed, and hydra's errors for overrides that do not compose.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("verl is not installed in this environment")
    directory = Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base=None, job_name="doctor"):
        config = compose(config_name, overrides=overrides, return_hydra_config=True)
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    assert isinstance(choices, dict)
    with open_dict(config):
        del config["hydra"]
    return config, Invocation(tuple(overrides), {str(group): choice for group, choice in choices.items()})


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
        return {"trainer": f"import failed with {type(cause).__name__}: {cause}"}
    return dict(importlib.import_module(_PLUGIN).failures)


def table_of(rows: list[Row]) -> Table:
    """One line per check, or per finding where a check found something."""
    table = Table(title="verl-pivot doctor", title_justify="left", show_lines=True)
    for column, ratio in (("check", 2), ("status", 1), ("detail", 6), ("way out", 5)):
        table.add_column(column, ratio=ratio, overflow="fold")
    for row in rows:
        if not row.findings:
            table.add_row(row.check, Text("ok", style="green"), Text(row.text), "")
        for finding in row.findings:
            style = "red" if finding.severity == "error" else "yellow"
            shown = finding.option if finding.value is None else f"{finding.option}={finding.value}"
            detail = Text(f"{shown}\n{finding.problem}")
            table.add_row(row.check, Text(finding.severity, style=style), detail, Text(finding.way_out))
    return table
