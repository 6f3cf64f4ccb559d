"""Tables of the simulated benchmarks for ``benchmarks/render.py``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

Document = Mapping[str, Any]
Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

_CASE = ("policy", "judge", "lengths", "staleness")
_LOSSES = ("small_batches", "recomputed", "shifting", "publish", "reload", "idle")


def cluster(document: Document, table: Table) -> str:
    """One table for each pair, lengths and staleness: what each deployment makes, and what keeps it from the bound."""
    gains = {(*_case(gain), gain["over"], gain["which"]): gain for gain in document["gains"]}
    parts = [f"- {note}" for note in document["notes"]]
    for case, rows in groupby(document["rows"], key=_case):
        policy, judge, lengths, staleness = case
        parts.append(f"**{policy} judged by {judge}, {lengths}, staleness {staleness}**")
        lines = []
        for row in rows:
            gain = gains.get((*case, row["deployment"], row["which"]))
            lines.append(
                [
                    f"`{row['deployment']}` ({row['which']} {row['split']})",
                    f"{row['tokens_per_s']:,.0f}",
                    f"{row['step_s']:.0f}",
                    f"{row['bound_fraction']:.2f}",
                    f"{gain['gain']:.2f}" if gain else "",
                    f"{gain['lookahead_gain']:.2f}" if gain else "",
                    gain["published"] if gain else "",
                    *(f"{row[name]:.0%}" for name in _LOSSES),
                ]
            )
        names = [name.replace("_", " ") for name in _LOSSES]
        columns = [
            "deployment (train/rollout/genrm)",
            "tokens/s",
            "step s",
            "of bound",
            "gain",
            "look-ahead",
            "published",
            *names,
        ]
        parts.append(table(columns, lines))
    return "\n\n".join(parts)


def sensitivity(document: Document, table: Table) -> str:
    """Gains of the harmonic rule, and of the planner that looks ahead, over what has a published range."""
    published = document["published"]
    response, judgement = document["assumed"]["response"], document["assumed"]["judgement"]
    head = (
        f"{document['policy']} judged by {document['judge']} on {document['gpus']} GPUs, staleness "
        f"{document['staleness']}, every deployment at the same split, {document['rows'][0]['split']}. Assumed: "
        f"responses of median {response['median_tokens']:g} tokens and sigma {response['sigma']:g}, judgements of "
        f"median {judgement['median_tokens']:g} and sigma {judgement['sigma']:g}. Each row changes one assumption. "
        "Gains of the harmonic rule / of the planner that looks ahead:"
    )
    rows = [
        [
            row["changed"],
            *(f"{row[f'harmonic_over_{rival}']:.2f} / {row[f'lookahead_over_{rival}']:.2f}" for rival in published),
            f"{row['harmonic_bound_fraction']:.2f} / {row['lookahead_bound_fraction']:.2f}",
        ]
        for row in document["rows"]
    ]
    rows.insert(0, ["*published*", *(f"{low:.2f} to {high:.2f}" for low, high in published.values()), ""])
    return "\n\n".join([head, table(["changed", *(f"over `{rival}`" for rival in published), "of bound"], rows)])


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _CASE)


def fidelity(document: Document, table: Table) -> str:
    """Measured beside simulated, phase by phase where they do not overlap, and from other fits."""
    rows = [
        [f"`{row['deployment']}`", f"{row['measured_s']:.1f}", f"{row['simulated_s']:.1f}", f"{row['miss']:+.0%}"]
        for row in document["rows"]
    ]
    parts = [table(["deployment", "measured step s", "simulated step s", "miss"], rows), _verdict(document)]
    for row in document["rows"]:
        if "phases_s" in row:
            measured, simulated = row["phases_s"]["measured"], row["phases_s"]["simulated"]
            lines = [[name, f"{measured[name]:.1f}", f"{simulated[name]:.1f}"] for name in measured if measured[name]]
            parts += [f"A step of `{row['deployment']}`:", table(["phase", "measured s", "simulated s"], lines)]
    names = [row["deployment"] for row in document["rows"]]
    others = [
        [fitted_to, *(f"{misses[name]:+.0%}" for name in names)] for fitted_to, misses in document["other_fits"].items()
    ]
    parts += ["Misses with costs fitted otherwise:", table(["fitted to", *(f"`{name}`" for name in names)], others)]
    return "\n\n".join([*parts, *(f"- {note}" for note in document["notes"])])


def _verdict(document: Document) -> str:
    rows, reversed_pairs = document["rows"], document["clear_pairs_reversed"]
    count = sum(abs(row["miss"]) <= document["within"] for row in rows)
    if document["same_ranking"]:
        ranking = "the ranking is the same"
    elif reversed_pairs:
        ranking = f"the ranking is not the same: {len(reversed_pairs)} clear differences are reversed"
    else:
        ranking = (
            f"the ranking is the same as far as it was measured clearly ({document['clear_pairs']} of "
            f"{len(rows) * (len(rows) - 1) // 2} pairs differ by more than twice the standard error of that)"
        )
    return f"{count} of {len(rows)} step times are within {document['within']:.0%}; {ranking}."


def lengths(document: Document, table: Table) -> str:
    """Loss over that of the pooled estimator; in brackets the least there is to reach."""

    def pair(row: Mapping[str, Any], level: str) -> str:
        return f"{row[f'{level}_loss_over_pooled']:.2f} ({row[f'{level}_least_over_pooled']:.2f})"

    rows = [
        [
            f"correlation {row['correlation']:g}, sigma {row['sigma']:g}",
            pair(row, "p50"),
            pair(row, "p90"),
            f"{row['p50_coverage']:.0%}",
            f"{row['p90_coverage']:.0%}",
        ]
        for row in document["rows"]
    ]
    mean = {name: document[f"mean_{name}"] for name in ("p50_loss_over_pooled", "p90_loss_over_pooled")}
    least = {name: document[f"mean_{name}"] for name in ("p50_least_over_pooled", "p90_least_over_pooled")}
    rows.append(["**mean**", pair({**mean, **least}, "p50"), pair({**mean, **least}, "p90"), "", ""])
    head = "In brackets: one who knows every prompt's true distribution, the least there is to reach."
    return "\n\n".join([head, table(["workload", "p50", "p90", "p50 covers", "p90 covers"], rows)])


def random_workloads(document: Document, table: Table) -> str:
    """The summary, and every case that was lost."""
    rows = document["rows"]
    over = "over_harmonic"
    heavy = document[f"median_{over}_heavy_tail"]
    head = (
        f"{document['cases']} workloads, seeds 0 to {document['cases'] - 1}. "
        f"Look-ahead over the harmonic rule: median {document[f'median_{over}']:.3f}, "
        f"geometric mean {document[f'mean_{over}']:.3f}, worst {document[f'worst_{over}']:.2f}, median of heavy tails "
        f"{'-' if heavy is None else f'{heavy:.3f}'}; at least 0.99 in "
        f"{document['share_at_least_harmonic_less_1_percent']:.0%}. Over the best fixed deployment: median "
        f"{document['median_over_best_fixed']:.3f}, geometric mean {document['mean_over_best_fixed']:.3f}, worst "
        f"{document['worst_over_best_fixed']:.2f}, at least 0.98 in "
        f"{document['share_at_least_fixed_less_2_percent']:.0%}."
    )
    lost, won = document["clearly_lost_to"], document["clearly_won_over"]
    clear = (
        f"A case is clear when its whole {document['confidence']:.0%} interval, from bunch to bunch of steps, is above "
        f"1 or below what may be missed (0.99, 0.98): against the harmonic rule {len(won['harmonic'])} are clearly won "
        f"and {len(lost['harmonic'])} clearly lost, against the best fixed deployment {len(won['fixed'])} and "
        f"{len(lost['fixed'])}. The cases that miss one of the two, clearly or not:"
    )
    columns = ("seed", "policy", "gpus", "staleness", "sigma", "split")
    lines = [
        [*(str(row[name]) for name in columns), _within(row, over), _within(row, "over_fixed")]
        for row in sorted(rows, key=lambda row: float(row[over]))
        if row["seed"] in set(document["lost"])
    ]
    return "\n\n".join([head, clear, table([*columns, "over harmonic", "over fixed"], lines)])


def _within(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_within"]
    return f"{row[name]:.3f} ({low:.2f} to {high:.2f})"
