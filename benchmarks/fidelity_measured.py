"""What ``deployments_cpu.json`` says of the measured steps, at machine speed 1. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


class Measured:
    """``document`` is the measured one."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.deployments = document["deployments"]
        self.cores = document["environment"]["cores"]
        self._slots_cores = document["slots"] * document["share_cores"]

    def step_s(self, name: str) -> float:
        """A mean step, from the throughput that the document gives at that speed."""
        entry = self.deployments[name]
        return float(entry["response_tokens"] / entry["steps"] / entry["equal_speed_tokens_per_s"])

    def phases_s(self, name: str) -> dict[str, float]:
        """A mean step's phases, by verl's own timers."""
        entry = self.deployments[name]
        spent = {phase: seconds * entry["machine_speed"] for phase, seconds in entry["timing_s_mean"].items()}
        return {
            "until training": sum(spent.get(phase, 0.0) for phase in ("acquire_slots", "gen", "reward")),
            "of it, judging after the last response": spent.get("reward", 0.0),
            "training": sum(spent[phase] for phase in ("old_log_prob", "adv", "update_actor")),
            "new weights": spent["update_weights"],
        }

    def core_s(self, name: str) -> float:
        """CPU seconds of a mean step, of slots and of all processes outside them."""
        entry = self.deployments[name]
        used_s = entry["bound_s"] * self._slots_cores + entry["outside_cores"] * entry["wall_s"]
        return float(used_s / entry["steps"] * entry["machine_speed"])

    def clear_order(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs (faster, slower) whose steps differ by more than twice the standard error of the difference."""
        seconds = {
            name: [step["step_s"] * step["machine_speed"] for step in self.deployments[name]["by_step"]]
            for name in names
        }
        found = []
        for first, second in combinations(seconds, 2):
            error_s = sum(statistics.variance(seconds[name]) / len(seconds[name]) for name in (first, second)) ** 0.5
            slower_s = statistics.mean(seconds[second]) - statistics.mean(seconds[first])
            if abs(slower_s) > 2 * error_s:
                found.append((first, second) if slower_s > 0 else (second, first))
        return found
