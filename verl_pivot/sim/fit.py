"""Costs from runs: what their event logs say of decoding, training, shifts and publishing.

Called by ``verl-pivot fit`` and by benchmarks. Needs the logs alone, no checkpoint and no model. What a log cannot tell
is named in ``Fitted.doubts`` instead of being made up in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_pivot.core.cost_book import CostBook, RoleCosts
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role
from verl_pivot.sim import fit_changes
from verl_pivot.sim.fit_engines import engine_costs
from verl_pivot.sim.fit_log import FitError, RunLog
from verl_pivot.sim.fit_training import TrainSample, train_cost, train_samples


@dataclass(frozen=True)
class Fitted:
    """Costs, and what the runs could not tell."""

    book: CostBook
    doubts: tuple[str, ...]
    """One line for each figure, with its name in the cost file, the range that fits as well, and what is taken."""


def fit_runs(
    runs: Sequence[RunLog],
    *,
    kv_tokens: Mapping[Role, int],
    max_sequences: Mapping[Role, int],
    prompt_tokens: Mapping[Role, float],
    more_training: Iterable[TrainSample] = (),
) -> Fitted:
    """The costs of one slot. Runs of unequal training pools tell more of training than one does.

    Args:
        runs: with the same models, prompts and settings of engines.
        kv_tokens, max_sequences: of one slot, by inference role; they are settings, not measurements.
        prompt_tokens: mean prompt of a request by role, of which the log says nothing.
        more_training: what training took elsewhere, on slots like these.

    Raises FitError when runs are too short, or logs were written without the tokens that sequences hold.
    """
    engines = {role: engine_costs(runs, role, prompt_tokens[role]) for role in INFERENCE_ROLES}
    samples = [sample for run in runs for sample in train_samples(run, prompt_tokens[Role.ROLLOUT])]
    train, train_doubts = train_cost([*samples, *more_training])
    shifts, publish_s = fit_changes.shift_s(runs), fit_changes.publish_s(runs)
    if publish_s is None or not shifts:
        raise FitError("the run published nothing or shifted no slot: fit the costs to one that did both")
    doubts = [doubt for costs in engines.values() for doubt in costs.doubts] + list(train_doubts)
    feed_s = _over(runs, fit_changes.feed_s, "feed_s", doubts)
    collect_s = _over(runs, fit_changes.collect_s, "collect_s", doubts)
    roles = {
        role: RoleCosts(costs.decode, costs.prefill_s_per_token, kv_tokens[role], max_sequences[role])
        for role, costs in engines.items()
    }
    reload_s = fit_changes.median([fit_changes.reload_s(run.events) * run.speed for run in runs])
    return Fitted(CostBook(roles, train, shifts, publish_s, reload_s, feed_s, collect_s), tuple(doubts))


def _over(runs: Sequence[RunLog], measure: Callable[[RunLog], float | None], name: str, doubts: list[str]) -> float:
    """Median over the runs that show it; 0, and a doubt, where none does."""
    found = [seconds for seconds in map(measure, runs) if seconds is not None]
    if not found:
        doubts.append(f"{name} cannot be told: no load sample shows when a step's work was handed on; 0 is taken")
    return fit_changes.median(found)


__all__ = ["FitError", "Fitted", "RunLog", "TrainSample", "fit_runs"]
