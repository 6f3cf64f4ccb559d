"""What the fits share: a run's events with the speed of its machine, and what a fit may say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl_pivot.core.snapshot import Role
from verl_pivot.observe.kinds import Event


class FitError(ValueError):
    """A run's log does not hold what a fit needs; the message says what is missing."""


@dataclass(frozen=True)
class RunLog:
    """One run to fit costs to."""

    events: Sequence[Event]
    """Sorted by time."""
    speed: float = 1.0
    """Of its machine, where runs on machines of unequal speed are fitted together: its seconds count so many times."""

    @cached_property
    def steps(self) -> list[Any]:
        """Events of steps that trained on something."""
        return [event for event in self.events if event["kind"] == "step" and event.get("response_tokens")]

    @property
    def responses(self) -> int:
        return sum(step["responses"] for step in self.steps)

    def of(self, kind: str) -> Iterator[Any]:
        return (event for event in self.events if event["kind"] == kind)

    def train_slots(self) -> int:
        """Slots that can train."""
        start = next(self.of("run_start"), None)
        if start is None:
            raise FitError("the log has no run_start event: its beginning is lost; fit the costs to a whole one")
        return sum(str(Role.TRAIN) in slot["can_host"] for slot in start["slots"])


def between(lowest: float, highest: float, unit: str, scale: float = 1.0) -> str:
    return f"anything from {lowest * scale:.3g} to {highest * scale:.3g} {unit} fits about as well"
