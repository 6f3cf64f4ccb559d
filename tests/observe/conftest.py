"""A made-up run: slots that follow the work through a few steps, told as the events that a real run would write."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

Events = list[dict[str, Any]]

SHIFT_S = {"drain_s": 0.6, "sleep_s": 0.5, "load_s": 1.6, "wake_s": 0.5}


class MadeUpRun:
    """Each step: everyone rolls out, judges join as responses finish, then the train slots update and publish."""

    def __init__(self, slots: int, steps: int, seed: int = 0, sample_s: float = 1.0) -> None:
        self.random = random.Random(seed)
        self.roles = ["rollout"] * slots
        self.away_until_s = [0.0] * slots
        self.train_slots = range(slots - max(1, slots // 4), slots)
        self.sample_s, self.steps, self.now_s, self.version = sample_s, steps, 0.0, 0
        self.events: Events = []
        info = [{"slot": i, "role": "rollout", "can_host": ["rollout", "genrm", "train"]} for i in range(slots)]
        self.tell("run_start", run_id="made-up run", slots=info, config={"planner": {"name": "harmonic"}})

    def tell(self, kind: str, t_s: float | None = None, **fields: Any) -> None:
        self.events.append({"t_s": self.now_s if t_s is None else t_s, "kind": kind, **fields})

    def shift(self, slot: int, target: str, outcome: str = "done", error: str | None = None) -> None:
        source, start_s = self.roles[slot], self.now_s
        phases = {key: value * self.random.uniform(0.7, 1.3) for key, value in SHIFT_S.items()}
        duration_s = sum(phases.values())
        self.tell(
            "shift",
            t_s=start_s + duration_s,
            slot=slot,
            source=source,
            target=target,
            t_start_s=start_s,
            duration_s=duration_s,
            **phases,
            aborted=self.random.randrange(4) if target != "train" else 0,
            outcome=outcome,
            reason=f"{target} is the bottleneck",
            gain=1200.0,
            cost=300.0,
            **({"error": error} if error else {}),
        )
        self.away_until_s[slot] = start_s + duration_s
        if outcome == "done":
            self.roles[slot] = target
        elif outcome == "failed":
            self.tell("slot_failed", t_s=start_s + duration_s, slot=slot, role=target, error=error or "")
            self.roles[slot] = "failed"

    def sample(self, running: dict[str, float], queued: dict[str, int]) -> None:
        slots = {}
        for slot, role in enumerate(self.roles):
            away = self.now_s < self.away_until_s[slot]
            share = 0 if away else max(0, round(running.get(role, 0.0) * self.random.uniform(0.6, 1.4)))
            status = "failed" if role == "failed" else "shifting" if away else "serving"
            slots[str(slot)] = {
                "role": "rollout" if role == "failed" else role,
                "status": status,
                "running": share,
                "waiting": 0,
                "tokens_per_s": 40.0 * share,
            }
        self.tell("load", slots=slots, queued=queued)

    def pass_time(self, seconds: float, running: Callable[[float], dict[str, float]]) -> None:
        start_s, end_s = self.now_s, self.now_s + seconds
        while self.now_s < end_s:
            x = (self.now_s - start_s) / seconds
            now = running(x)
            queued = {role: round(max(0.0, 8 * (now.get(role, 0.0) - 4.5))) for role in ("rollout", "genrm")}
            self.sample(now, queued)
            self.now_s = min(end_s, self.now_s + self.sample_s)

    def step(self, number: int) -> None:
        began_s, slots = self.now_s, len(self.roles)
        self.tell("plan", reason=f"rollout alone has work: 0 of {16 * slots} to judge", shifts=0)
        self.pass_time(16, lambda x: {"rollout": 9.0 * (1 - 0.5 * x)})
        judges = [i for i in range(slots) if self.roles[i] == "rollout"][: max(1, slots // 2)]
        self.tell("plan", reason="genrm is the bottleneck", shifts=len(judges))
        for slot in judges:
            self.shift(slot, "genrm", *self.mishap(number, slot))
            self.pass_time(8 / len(judges), lambda x: {"rollout": 4.0, "genrm": 2.0})
        self.pass_time(12, lambda x: {"rollout": 4.0 * (1 - x) ** 2 - 0.2, "genrm": 5.0 * (1 - x)})
        self.tell("lease", state="wanted")
        for slot in self.train_slots:
            if self.roles[slot] != "failed":
                self.shift(slot, "train")
        self.pass_time(5, lambda x: {"genrm": 1.5 * (1 - 2 * x)})
        self.tell("lease", state="held")
        for name, seconds in (("old_log_prob", 3.0), ("update_actor", 7.5)):
            start_s = self.now_s
            self.pass_time(seconds, lambda x: {})
            self.tell("span", role="train", name=name, t_start_s=start_s, duration_s=seconds)
        self.version += 1
        self.pass_time(1.2, lambda x: {})
        self.tell("publish", version=self.version, duration_s=1.2, bytes=3_000_000_000)
        self.tell("lease", state="free")
        for slot in range(slots):
            if self.roles[slot] in ("train", "genrm"):
                self.shift(slot, "rollout")
                self.tell("served", slot=slot, role="rollout", version=self.version)
        count = 4 * slots
        self.tell(
            "step",
            step=number,
            wall_s=self.now_s - began_s,
            prompts=count,
            responses=4 * count,
            rewards=4 * count,
            response_tokens=900 * count,
            reward_mean=0.3 + 0.02 * number,
            accuracy=0.25 + 0.02 * number,
            judge_agreement=None if number == 1 else 0.9,
            probs_diff_max=0.01 / number,
            policy_version=self.version,
        )

    def mishap(self, step: int, slot: int) -> tuple[str, str | None]:
        if step == 2 and slot == 0:
            return "failed", "genrm engine of slot 0 did not wake within 120 s"
        if step == 2 and slot == 1:
            return "rolled_back", "genrm engine of slot 1 did not sleep within 60 s"
        return "done", None

    def run(self) -> Events:
        for number in range(1, self.steps + 1):
            self.step(number)
            if self.roles[0] == "failed":
                self.tell("slot_recovered", slot=0, role="rollout")
                self.roles[0] = "rollout"
        self.now_s += 4.5
        count = 4 * len(self.roles) * self.steps
        self.tell("run_end", outcome="finished", lost=0, prompts=count, responses=4 * count, rewards=4 * count)
        self.events.sort(key=lambda e: e["t_s"])
        assert math.isfinite(self.now_s)
        return self.events


@pytest.fixture(scope="session")
def made_up_run() -> Callable[..., Events]:
    """``made_up_run(slots, steps, seed=0, sample_s=1.0)`` -> events."""
    return lambda slots, steps, **options: MadeUpRun(slots, steps, **options).run()
