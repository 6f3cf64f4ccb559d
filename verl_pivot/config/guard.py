"""A hydra callback whose construction fails when the plugin is not there; named by ``resource_shift/pivot.yaml``.

Hydra turns exceptions of a callback's methods into warnings, but not those of its constructor.
"""

from __future__ import annotations

import sys

from hydra.experimental.callback import Callback

PLUGIN = "verl_pivot.plugin"


class PluginGuard(Callback):
    """Built by ``hydra.main`` in the driver, after verl (and with it the plugin) was imported, before the task runs.

    Raises RuntimeError when verl did not load the plugin or a part of it failed.
    """

    def __init__(self) -> None:
        plugin = sys.modules.get(PLUGIN)
        if plugin is None or not getattr(plugin, "registered", False):
            raise RuntimeError(
                "resource_shift was asked for, but verl has not loaded the plugin verl_pivot: is verl-pivot installed "
                "in this environment, and does VERL_USE_EXTERNAL_PLUGINS (default: auto) let it in?"
            )
        failures = getattr(plugin, "failures", {})
        if failures:
            causes = "; ".join(f"{part}: {cause}" for part, cause in failures.items())
            raise RuntimeError(f"resource_shift was asked for, but parts of the plugin verl_pivot failed: {causes}")
