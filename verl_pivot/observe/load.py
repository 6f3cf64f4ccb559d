"""Load samples, summed by role. Shared by the trace's counters and the picture's lower panel."""

from __future__ import annotations

from verl_pivot.observe.kinds import INFERENCE_ROLES, LoadEvent


def load_by_role(event: LoadEvent) -> dict[str, dict[str, float]]:
    """Sums of one load sample: counter name -> inference role -> value. Only serving slots count."""
    sums: dict[str, dict[str, float]] = {
        name: dict.fromkeys(INFERENCE_ROLES, 0.0) for name in ("running", "waiting", "queued", "tokens/s")
    }
    for load in event["slots"].values():
        role = str(load["role"])
        if role in INFERENCE_ROLES and load.get("status", "serving") == "serving":
            sums["running"][role] += load["running"]
            sums["waiting"][role] += load.get("waiting", 0)
            sums["tokens/s"][role] += load.get("tokens_per_s", 0.0)
    for role in INFERENCE_ROLES:
        sums["queued"][role] = float(event["queued"].get(role, 0))
    return sums
