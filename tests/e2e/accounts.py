"""What must add up in every run, from independent sources: verl's dumps, the reward function's notes, our events."""

from __future__ import annotations

from collections import Counter
from typing import Any

from e2e.launch import Run
from e2e.toy_task import prompt_index


def assert_adds_up(run: Run, report: dict[str, Any], steps: list[int], prompts: int, n: int) -> None:
    """Every trained step has ``prompts`` prompts of ``n`` responses, each with one reward, and nothing is lost."""
    trained = run.trained()
    assert sorted(trained) == steps
    for step, responses in trained.items():
        per_prompt = Counter(prompt_index(response["input"]) for response in responses)
        assert per_prompt == dict.fromkeys(per_prompt, n) and len(per_prompt) == prompts, f"step {step}: {per_prompt}"
    assert report["lost"] == 0
    assert report["steps"] == len(steps)
    assert report["prompts"] == len(steps) * prompts
    assert report["responses"] == report["rewards"] == len(steps) * prompts * n
    (end,) = run.events("run_end")[-1:]
    assert end["submitted"] == end["prompts"] + end["dropped"] + end["in_flight"]


def assert_judged_once(run: Run, n: int) -> None:
    """The reward function was called ``n`` times for each prompt that was trained on, and its scores were used."""
    calls = Counter(note["index"] for note in run.ledger())
    trained = {prompt_index(r["input"]) for responses in run.trained().values() for r in responses}
    assert {index: calls[index] for index in trained} == dict.fromkeys(trained, n)


def assert_versions_served(run: Run, last: int, staleness: int = 0) -> None:
    """Engines say what they serve: published versions only, never an older one than before, judges their only one.
    Of ``last`` versions published, the run may end before the newest ``staleness`` were needed."""
    published = [event["version"] for event in run.events("publish")]
    assert published == list(range(published[0], last + 1))
    newest: dict[int, int] = {}
    for event in run.events("served"):
        if event["role"] == "genrm":
            assert event["version"] == 0
            continue
        assert event["version"] in published
        assert event["version"] >= newest.get(event["slot"], published[0])
        newest[event["slot"]] = event["version"]
    assert last - staleness <= max(newest.values()) <= last


def worst_staleness(run: Run) -> float:
    """The most that any token of a trained response lagged behind the weights it was trained into, in versions."""
    name = "training/off_policy/trajectory_staleness_worst/max"
    values = [step.get(name) for step in run.metrics().values()]
    return max(value for value in values if value is not None)
