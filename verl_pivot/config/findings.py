"""What a check found: the option, its value, what is wrong with it, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (``error``: the run is refused) or doubtful (``warning``)."""

    severity: Severity
    option: str
    """Full name of the option, as one would write it on the command line."""
    value: Any
    problem: str
    way_out: str

    def __str__(self) -> str:
        shown = self.option if self.value is None else f"{self.option}={_short(self.value)}"
        return f"{self.severity}: {shown}\n    {self.problem}\n    -> {self.way_out}"


def error(option: str, value: Any, problem: str, way_out: str) -> Finding:
    return Finding("error", option, value, problem, way_out)


def warning(option: str, value: Any, problem: str, way_out: str) -> Finding:
    return Finding("warning", option, value, problem, way_out)


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


def render(findings: Iterable[Finding]) -> str:
    """One message with everything that was found, errors first."""
    ordered = sorted(findings, key=lambda finding: finding.severity != "error")
    refused = len(errors_of(ordered))
    if refused:
        head = (
            f"verl-pivot refuses this configuration ({refused} error{'s' if refused > 1 else ''}); nothing was started."
        )
    else:
        head = f"verl-pivot: {len(ordered)} warning{'s' if len(ordered) != 1 else ''} about this configuration."
    return "\n".join([head, *(f"  {finding!s}" for finding in ordered)])


class ConfigRefused(ValueError):
    """A configuration with errors; the message lists all of them. Raised before anything is started."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__(render(self.findings))


def _short(value: Any, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
