"""The arrows of the design, as contracts in ``.importlinter``; and that the package itself is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_layers_are_kept() -> None:
    run = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--config", str(ROOT / ".importlinter"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


def test_importing_the_package_is_light() -> None:
    source = (
        "import sys, verl_pivot, verl_pivot.config.schema, verl_pivot.core.snapshot, verl_pivot.verl_ext, "
        "verl_pivot.vllm_ext, verl_pivot.import_hooks\n"
        "heavy = {'torch', 'ray', 'verl', 'vllm', 'transformers', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
