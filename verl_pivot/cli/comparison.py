"""What ``verl-pivot simulate`` shows: deployments beside each other, where their time went, and what it comes to.

Fits a terminal of 80 columns, which is what pipes and logs get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from verl_pivot.sim.result import SimResult
    from verl_pivot.sim.scenario import Scenario

_SHARES: Mapping[str, tuple[str, ...]] = {
    "decode": ("decode",),
    "prefill": ("prefill",),
    "update": ("update",),
    "small": ("small_batches",),
    "again": ("recomputed",),
    "shift": ("shifting",),
    "weights": ("publish", "reload"),
    "idle": ("idle",),
}
"""Column -> figures of the ledger."""
LEGEND = (
    "decode, prefill, update: of use, at the best rate there is. small: what decoding takes longer in batches smaller "
    "than the largest. again: prefill of what had been computed before. shift: slots on their way between roles. "
    "weights: publishing and loading new ones. idle: the rest."
)


def ours(results: list[SimResult]) -> SimResult:
    """The one that real runs have by default."""
    from verl_pivot.sim.deployments import Deployment

    return next(result for result in results if result.deployment is Deployment.HARMONIC)


def show(console: Console, scenario: Scenario, results: list[SimResult]) -> None:
    """Two tables and a sentence."""
    console.print(_deployments(scenario, results))
    console.print(
        "slots: train/rollout/genrm. x default: tokens/s of resource_shift over this row. bound: no GPU ever idle, "
        "every role at its best."
    )
    console.print(_ledgers(results))
    console.print(LEGEND)
    console.print(f"\n{verdict(results)}\nAll figures are simulated; docs/simulator.md says from what.")


def verdict(results: list[SimResult]) -> str:
    """What shifting comes to here, and why not more."""
    from verl_pivot.sim.advice import WORTH
    from verl_pivot.sim.search import SHIFTING

    best = max((r for r in results if r.deployment in SHIFTING), key=lambda r: r.tokens_per_s)
    rival = max((r for r in results if r.deployment not in SHIFTING), key=lambda r: r.tokens_per_s)
    gain = best.tokens_per_s / rival.tokens_per_s
    most = 1 / rival.bound_fraction
    said = (
        f"{best.deployment} ({best.split}) makes {gain:.2f} times the tokens of {rival.deployment} ({rival.split}), "
        f"the best without it; the bound allows {most:.2f} times."
    )
    return said if gain >= WORTH else f"Little to gain here: {said}"


def _deployments(scenario: Scenario, results: list[SimResult]) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{scenario.title}, staleness {scenario.staleness}, seed {scenario.seed} (simulated)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("deployment", no_wrap=True)
    for column in ("slots", "tokens/s", "step s", "of bound", "x default"):
        table.add_column(column, justify="right")
    best = ours(results)
    for result in results:
        table.add_row(
            str(result.deployment),
            str(result.split),
            f"{result.tokens_per_s:,.0f}",
            f"{result.step_s:.1f}",
            f"{result.bound_fraction:.2f}",
            f"{best.tokens_per_s / result.tokens_per_s:.2f}" if result is not best else "",
        )
    return table


def _ledgers(results: list[SimResult]) -> Table:
    from rich import box
    from rich.table import Table

    title = "Where the time of all slots went"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("deployment", no_wrap=True)
    for column in _SHARES:
        table.add_column(column, justify="right")
    for result in results:
        ledger = vars(result.ledger)
        shares = (sum(ledger[figure] for figure in figures) for figures in _SHARES.values())
        table.add_row(str(result.deployment), *(f"{share:.0%}" for share in shares))
    return table
