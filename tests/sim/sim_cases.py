"""A small cluster for tests of the simulator."""

from __future__ import annotations

from typing import Any

from verl_pivot.sim.cluster import Cluster
from verl_pivot.sim.models import CostFile
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.workload import LengthSpec, Workload

FILE = CostFile.read()


def workload(**changes: Any) -> Workload:
    values: dict[str, Any] = {
        "response": LengthSpec(600, 0.8, 4000, correlation=0.5),
        "judgement": LengthSpec(400, 0.6, 4000, correlation=0.3),
        "prompts_per_step": 16,
        "responses_per_prompt": 8,
        "mini_batch_prompts": 4,
    }
    return Workload(**{**values, **changes})


def scenario(gpus: int = 8, policy: str = "Qwen2.5-1.5B", judge: str = "GLM-Z1-9B", **changes: Any) -> Scenario:
    work = changes.pop("workload", None) or workload()
    return Cluster.of(FILE, policy, judge, gpus, "H20").scenario(work, **changes)
