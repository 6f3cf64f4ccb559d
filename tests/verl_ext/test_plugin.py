"""The plugin in child processes, as verl loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

pytestmark = pytest.mark.contract


def run_python(source: str, **environ: str) -> tuple[dict[str, Any], str]:
    """Runs ``source``, which prints one JSON object as its last line; returns that and stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def test_loading_is_light_and_whole() -> None:
    """Cost next to verl's own import, and what is hooked; on the CPU platform, where it does the most."""
    report, _ = run_python(
        """
        import json, sys, time
        import verl
        assert "verl_pivot.plugin" not in sys.modules
        before = set(sys.modules)
        start = time.process_time()
        import verl_pivot.plugin as plugin
        cost_s = time.process_time() - start
        from verl_pivot.import_hooks import waiting
        heavy = [name for name in set(sys.modules) - before if name.split(".")[0] in ("vllm", "ray", "transformers")]
        print(json.dumps({"cost_s": cost_s, "failures": plugin.failures, "waiting": waiting(), "heavy": heavy}))
        """,
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert report["failures"] == {}
    assert report["heavy"] == []
    assert report["cost_s"] < 0.3
    assert {"verl.trainer.ppo.v1", "verl.workers.engine", "verl.utils.fsdp_utils"} <= set(report["waiting"])


def test_verl_loads_it_and_everything_registers() -> None:
    report, _ = run_python(
        """
        import json, sys
        import verl
        from verl.plugin.platform import get_platform
        from verl.trainer.ppo.v1 import get_trainer_cls
        from verl.workers.engine import EngineRegistry
        import verl.utils.distributed, verl.utils.fsdp_utils
        import verl_pivot.plugin as plugin
        entry = get_trainer_cls("resource_shift")
        loaded = [name for name in sys.modules if name.startswith("verl_pivot.verl_ext.")]
        try:
            entry(config=None)
        except (AttributeError, TypeError):
            pass  # there is no configuration to build it from
        print(json.dumps({
            "failures": plugin.failures,
            "trainer_loaded_early": "verl_pivot.verl_ext.trainer" in loaded,
            "platform": type(get_platform()).__name__,
            "trainer": get_trainer_cls("resource_shift").__module__,
            "actor": EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
            "critic": EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__,
            "patched": [
                getattr(verl.utils.distributed.initialize_global_process_group_ray, "patched_by", None),
                getattr(verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu, "patched_by", None),
            ],
        }))
        """,
        VERL_PLATFORM="cpu",
    )
    assert report == {
        "failures": {},
        "trainer_loaded_early": False,
        "platform": "PlatformCPU",
        "trainer": "verl_pivot.verl_ext.trainer",
        "actor": "FSDPEngineWithLMHead",
        "critic": "FSDPEngineWithValueHead",
        "patched": ["one-gloo", "own-snapshot"],
    }


def test_elsewhere_nothing_of_the_cpu_platform_is_touched() -> None:
    report, _ = run_python(
        """
        import json
        import verl
        import verl.utils.distributed, verl.utils.fsdp_utils
        from verl.plugin.platform import get_platform
        from verl.workers.engine import EngineRegistry
        print(json.dumps({
            "is_cpu": type(get_platform()).__name__ == "PlatformCPU",
            "devices": sorted(map(str, EngineRegistry._engines["language_model"]["fsdp2"])),
            "patched": hasattr(verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu, "patched_by"),
        }))
        """,
        VERL_PLATFORM="",
    )
    assert report == {"is_cpu": False, "devices": ["cuda", "npu"], "patched": False}


def test_failure_is_loud_kept_and_refuses_in_the_trainer_mode() -> None:
    report, stderr = run_python(
        """
        import json, sys
        sys.modules["verl_pivot.verl_ext.switch"] = None  # importing it now raises
        import verl
        from verl.trainer.ppo.v1 import get_trainer_cls
        import verl_pivot.plugin as plugin
        try:
            get_trainer_cls("resource_shift")(config=None)
            said = "built"
        except RuntimeError as error:
            said = str(error)
        print(json.dumps({"failures": plugin.failures, "said": said}))
        """
    )
    assert list(report["failures"]) == ["switch"]
    assert "switch: ModuleNotFoundError" in report["said"]
    assert "switch could not be loaded" in stderr and "Traceback" in stderr
