"""Makes the config groups of verl_pivot visible to every hydra application, verl's own ``main_ppo`` among them.

``hydra_plugins`` is hydra's namespace package for plugins: it must not have an ``__init__.py``.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_pivot.config.findings import render
from verl_pivot.config.node import misspelt_overrides


class VerlPivotSearchPath(SearchPathPlugin):
    """Appends ``pkg://verl_pivot.config``: our groups are found, and never hide verl's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl-pivot", path="pkg://verl_pivot.config")
        # the last moment before hydra composes: an option that does not exist gets wrong advice from hydra itself
        misspelt = misspelt_overrides(sys.argv[1:])
        if misspelt:
            raise SystemExit(render(misspelt))
