"""The summary printed at the end of a run: the report's main figures, each with a few words on what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from verl_pivot.observe.kinds import PHASES, ROLES

Report = Mapping[str, Any]

_OUTCOME_STYLE = {"finished": "bold green", "failed": "bold red", "interrupted": "bold yellow"}
_MOST_REASONS = 4


def render_summary(report: Report) -> RenderableType:
    """Tables for ``rich.console.Console.print`` from what ``report.build_report`` returns."""
    parts: list[RenderableType] = [_figures(report), _roles(report)]
    if report["shifts"]:
        parts.append(_shifts(report))
    if report["no_shift_reasons"]:
        parts.append(_reasons(report))
    return Group(*parts)


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return table


def _figures(report: Report) -> Table:
    table = _table(f"Run {escape(report['run_id'])}", "figure", "value", "meaning", numbers=["value"])
    outcome = report["outcome"]
    style = _OUTCOME_STYLE.get(outcome, "bold")
    table.add_row("outcome", f"[{style}]{outcome}[/]", _OUTCOME_MEANING.get(outcome, ""))
    meaning = f"training steps, in {report['wall_s']:,.1f} s on {report['slots']} slots"
    table.add_row("steps", str(report["steps"]), meaning)
    if report["step_wall_s"]:
        table.add_row("step time", f"{fmean(report['step_wall_s']):,.1f} s", "mean wall time of a step")
    if report["response_tokens_per_s"] is not None:
        table.add_row("tokens/s", f"{report['response_tokens_per_s']:,.0f}", "response tokens per second of the steps")
    counts = f"{report['prompts']:,} / {report['responses']:,} / {report['rewards']:,}"
    unrewarded = report["responses"] - report["rewards"]
    meaning = f"[bold red]{unrewarded:,} rewards were no finite numbers[/]" if unrewarded else ""
    table.add_row("work", counts, f"prompts / responses / rewards {meaning}".rstrip())
    if report["lost"] is not None:
        lost = str(report["lost"]) if not report["lost"] else f"[bold red]{report['lost']}[/]"
        table.add_row("lost", lost, "prompts without all their rewards; must be 0")
    bound = report["work_conserving_bound"]
    meaning = f"share of the wall time that would do if every slot were always busy: {bound['bound_wall_s']:,.1f} s"
    table.add_row("bound", f"{bound['bound_fraction']:.0%}", meaning)
    _quality_rows(table, report)
    table.add_row("versions", str(len(report["versions_published"])), _publish_meaning(report))
    if report["failures"]:
        recovered = sum(f["recovered_s"] is not None for f in report["failures"])
        count = f"[bold red]{len(report['failures'])}[/]"
        table.add_row("failures", count, f"slots that failed; {recovered} came back. Last: {_last_error(report)}")
    return table


_OUTCOME_MEANING = {
    "finished": "all steps were done",
    "failed": "the run ended with an error",
    "interrupted": "stopped early, killed, or still running: no end was recorded",
}


def _quality_rows(table: Table, report: Report) -> None:
    if report["accuracy_first"] is not None and report["accuracy_last"] is not None:
        first, last = f"{report['accuracy_first']:.3f}", f"{report['accuracy_last']:.3f}"
        if report["steps"] > 3:
            meaning = "truly right responses, mean of the first and of the last 3 steps"
            table.add_row("accuracy", f"{first} -> {last}", meaning)
        else:
            table.add_row("accuracy", last, "truly right responses, mean of all steps")
    rewards = [reward for reward in report["reward"] if reward is not None]
    if rewards:
        table.add_row("reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}", "mean reward of the first and last step")
    if report["judge_agreement"] is not None:
        table.add_row("judge agreement", f"{report['judge_agreement']:.0%}", "judge's verdicts that match the truth")
    if report["probs_diff_max"] is not None:
        meaning = "largest difference of a token's probability, rollout against trainer"
        if report["config"].get("staleness"):
            meaning += ", which is newer where staleness > 0"
        table.add_row("probs diff", f"{report['probs_diff_max']:.1e}", meaning)


def _publish_meaning(report: Report) -> str:
    if report["publish_s"] is None:
        return "policy versions published"
    return f"policy versions published, {report['publish_s']:.2f} s each on average"


def _last_error(report: Report) -> str:
    last = report["failures"][-1]
    return escape(f"slot {last['slot']}: {last['error'] or 'no reason given'}")


def _roles(report: Report) -> Table:
    columns = ("role", "slot-seconds", "busy", "idle", "busy share")
    table = _table("Where the slots' time went", *columns, numbers=columns[1:])
    for role in ROLES:
        fraction = report["busy_fraction"][role]
        table.add_row(
            role,
            f"{report['slot_seconds'][role]:,.1f}",
            f"{report['busy_seconds'][role]:,.1f}",
            f"{report['idle_seconds'][role]:,.1f}",
            "-" if fraction is None else f"{fraction:.0%}",
        )
    table.add_row("shifting", f"{report['slot_seconds']['shifting']:,.1f}", "", "", "")
    if report["slot_seconds"]["failed"] > 0:
        table.add_row("failed", f"{report['slot_seconds']['failed']:,.1f}", "", "", "")
    return table


def _shifts(report: Report) -> Table:
    """One row per direction; means over its completed shifts."""
    done = [shift for shift in report["shifts"] if shift["outcome"] == "done"]
    others = {name: n for name, n in report["shift_outcomes"].items() if name != "done"}
    title = f"Shifts: {len(done)} done" + "".join(f", {n} {name.replace('_', ' ')}" for name, n in others.items())
    title += f"; {report['sequences_migrated']} sequences moved"
    phases = [phase.removesuffix("_s") for phase in PHASES]
    columns = ("from -> to", "shifts", "mean s", *phases)
    table = _table(title, *columns, numbers=columns[1:])
    for direction in sorted({(shift["from"], shift["to"]) for shift in done}):
        group = [shift for shift in done if (shift["from"], shift["to"]) == direction]
        means = [fmean(shift["phases"][phase] or 0.0 for shift in group) for phase in PHASES]
        duration = fmean(shift["duration_s"] for shift in group)
        table.add_row(" -> ".join(direction), str(len(group)), *(f"{value:.2f}" for value in (duration, *means)))
    return table


def _reasons(report: Report) -> Table:
    table = _table("No shift, because", "reason", "for", "times", numbers=["for", "times"])
    for entry in report["no_shift_reasons"][:_MOST_REASONS]:
        table.add_row(escape(entry["reason"]), f"{entry['seconds']:,.1f} s", str(entry["count"]))
    return table
