"""Checks of verl's counts: numbers below 1 that verl takes, and that end a run, or leave it waiting, minutes later."""

from __future__ import annotations

from verl_pivot.config.checks_batch import data_sharing_sizes
from verl_pivot.config.findings import Finding, error
from verl_pivot.config.subject import Subject

_ROLLOUT = "actor_rollout_ref.rollout"
_JUDGE = "reward.reward_model"
_COUNTS = {
    f"{_ROLLOUT}.n": "responses to a prompt",
    f"{_ROLLOUT}.max_num_seqs": "sequences that one engine takes at a time",
    f"{_ROLLOUT}.agent.num_workers": "processes that see to the responses",
    "reward.num_workers": "processes that see to the rewards",
}
"""Option -> what it counts."""


def counts(subject: Subject) -> list[Finding]:
    """Everything that is counted is there at least once; pools and replicas are the layout's own matter."""
    counted = dict(_COUNTS)
    if subject.get(f"{_JUDGE}.enable"):
        counted[f"{_JUDGE}.rollout.max_num_seqs"] = "requests that one judge engine takes at a time"
    findings = [_below_one(option, subject.get(option), what) for option, what in counted.items()]
    for option in data_sharing_sizes(subject):
        findings.append(_below_one(option, subject.get(option, 1), "training GPUs that share their data"))
    return [finding for finding in findings if finding is not None]


def _below_one(option: str, value: object, what: str) -> Finding | None:
    if isinstance(value, int) and value >= 1:
        return None
    return error(option, value, "must be a whole number, at least 1", f"set {option} to the number of {what}")
