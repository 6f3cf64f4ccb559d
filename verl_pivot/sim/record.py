"""The event log of a simulated run, in the format of a real one, so that the same pictures and reports come of it."""

from __future__ import annotations

from typing import Any, cast

from verl_pivot.core.plan import Plan
from verl_pivot.core.snapshot import Role, Snapshot
from verl_pivot.observe.kinds import Event, reason_class
from verl_pivot.sim.simulation import Simulation

LOAD_SPACING_S = 2.0


class _MeanRate:
    """Tokens a second of a slot since it was last asked, as engines report them; from its rates at every plan."""

    def __init__(self) -> None:
        self._role: Role | None = None
        self._rate = self._seen_s = self._tokens = self._seconds = 0.0

    def see(self, role: Role, rate: float, now_s: float) -> None:
        if role is self._role:
            self._tokens += (self._rate + rate) / 2 * (now_s - self._seen_s)
            self._seconds += now_s - self._seen_s
        else:
            self._tokens = self._seconds = 0.0
        self._role, self._rate, self._seen_s = role, rate, now_s

    def take(self) -> float:
        mean = self._tokens / self._seconds if self._seconds else self._rate
        self._tokens = self._seconds = 0.0
        return mean


class Recorder:
    """Give ``on_plan`` to the simulation, and ask for ``events`` when it has ended."""

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []
        self._sampled_s = float("-inf")
        self._told = ""
        self._rates: dict[int, _MeanRate] = {}

    def on_plan(self, snapshot: Snapshot, plan: Plan) -> None:
        now_s = snapshot.now_s
        for slot in snapshot.slots:
            self._rates.setdefault(slot.slot_id, _MeanRate()).see(slot.role, slot.load.tokens_per_s, now_s)
        told = reason_class(plan.reason)
        if plan.shifts or told != self._told:
            self._told = told
            self._seen.append({"t_s": now_s, "kind": "plan", "reason": plan.reason, "shifts": len(plan.shifts)})
        if now_s >= self._sampled_s + LOAD_SPACING_S:
            self._sampled_s = now_s
            slots = {
                str(slot.slot_id): {
                    "role": str(slot.role),
                    "status": str(slot.status),
                    "running": slot.load.running,
                    "waiting": slot.load.waiting,
                    "tokens_per_s": self._rates[slot.slot_id].take(),
                    "context_tokens": slot.load.context_tokens,
                }
                for slot in snapshot.slots
            }
            queued = {str(role): demand.queued for role, demand in snapshot.demand.items()}
            self._seen.append({"t_s": now_s, "kind": "load", "slots": slots, "queued": queued})

    def events(self, simulation: Simulation) -> list[Event]:
        """All events of the finished run, sorted by time."""
        found = [*_slot_events(simulation), *self._seen, *_trainer_events(simulation)]
        return cast(list[Event], sorted(found, key=lambda event: event["t_s"]))


def _slot_events(simulation: Simulation) -> list[dict[str, Any]]:
    layout = simulation.layout
    slots = [
        {"slot": at, "role": str(role), "can_host": sorted(map(str, can))}
        for at, (role, can) in enumerate(zip(layout.first_role, layout.can_host, strict=True))
    ]
    config = {"simulated": True, "deployment": str(layout.deployment), "split": str(layout.split)}
    found: list[dict[str, Any]] = [
        {"t_s": 0.0, "kind": "run_start", "run_id": f"simulated {layout.deployment}", "slots": slots, "config": config}
    ]
    for shift in simulation.slots.shifts:
        found.append(
            {
                "t_s": shift.end_s,
                "kind": "shift",
                "slot": shift.slot_id,
                "source": str(shift.source),
                "target": str(shift.target),
                "t_start_s": shift.start_s,
                "duration_s": shift.end_s - shift.start_s,
                "outcome": "done",
                "aborted": shift.evicted,
                "reason": shift.reason,
            }
        )
    return found


def _trainer_events(simulation: Simulation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, start_s, end_s in simulation.trainer.spans:
        found.append(
            {
                "t_s": end_s,
                "kind": "span",
                "role": str(Role.TRAIN),
                "name": name,
                "t_start_s": start_s,
                "duration_s": end_s - start_s,
            }
        )
    n = simulation.scenario.workload.responses_per_prompt
    before_s, responses, prompts = 0.0, 0, 0
    for version, step in enumerate(simulation.trainer.steps, start=1):
        counts = {"prompts": step.groups, "responses": step.groups * n, "rewards": step.groups * n}
        wall_s = step.end_s - before_s
        found.append(
            {
                "t_s": step.end_s,
                "kind": "publish",
                "version": version,
                "duration_s": simulation.scenario.costs.publish_s,
                "bytes": simulation.scenario.weight_bytes,
            }
        )
        found.append({"t_s": step.end_s, "kind": "step", "step": version, "wall_s": wall_s, **counts})
        found[-1]["response_tokens"] = step.response_tokens
        before_s, responses, prompts = step.end_s, responses + step.groups * n, prompts + step.groups
    end = {"outcome": "finished", "lost": 0, "prompts": prompts, "responses": responses, "rewards": responses}
    found.append({"t_s": simulation.env.now, "kind": "run_end", **end})
    return found
