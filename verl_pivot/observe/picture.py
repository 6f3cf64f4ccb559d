"""The role timeline as a PNG: a row per slot, a ruler of steps, and the running sequences of each role below.

A slot's row has the full colour of its role while it works and a pale one while it waits, so white space and pale
areas are what a better plan could still win. matplotlib is imported when a picture is drawn, and needs no display.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_pivot.observe.kinds import FAILED, INFERENCE_ROLES, ROLES, SHIFTING, Event
from verl_pivot.observe.load import load_by_role
from verl_pivot.observe.timeline import Interval, Timeline, build_timeline, shift_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"rollout": "#2f6db5", "genrm": "#ea8f2b", "train": "#35976a", FAILED: "#33303c"}
PALE = {"rollout": "#cfdff0", "genrm": "#fae1c4", "train": "#cce7da"}
INK, MUTED, HATCH, BAND = "#22252b", "#6b7078", "#8b9099", "#e9ebee"

_WIDTH_IN, _DPI = 13.0, 150
_TICK = "v"
_TICK_STYLE: dict[str, Any] = {"color": INK, "markersize": 5, "linestyle": "none", "clip_on": False}
_LABEL_X = -0.044
_MAX_POINTS = 1200
"""Points of a curve and, about, of a row: more than the picture has pixels for does not show."""


def draw_timeline(events: Sequence[Event], path: str | Path) -> Path:
    """Draws ``events`` (sorted by ``t_s``) to ``path`` and returns it.

    Raises ValueError without ``run_start``, ImportError (with the way out) without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing the role timeline needs matplotlib: install it (pip install matplotlib), or set "
            "trainer.resource_shift.observe.timeline_png=false"
        ) from error
    timeline = build_timeline(events)
    rows_in = min(max(0.36 * len(timeline.intervals), 1.5), 8.5)
    # Fixed inches above and below the panels, so that title and legend look the same at any number of slots.
    top_in, bottom_in, ruler_in, load_in, gap_in = 1.15, 0.6, 0.24, 1.9, 0.1
    height_in = top_in + rows_in + ruler_in + load_in + 2 * gap_in + bottom_in
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)

    def panel(below_top_in: float, panel_in: float, **options: Any) -> Axes:
        bottom = (height_in - below_top_in - panel_in) / height_in
        return figure.add_axes((0.062, bottom, 0.918, panel_in / height_in), **options)

    slots = panel(top_in, rows_in)
    ruler = panel(top_in + rows_in + gap_in, ruler_in, sharex=slots)
    load = panel(top_in + rows_in + ruler_in + 2 * gap_in, load_in, sharex=slots)
    unit, scale = _time_unit(timeline.wall_s)
    slots.set_xlim(timeline.start_s / scale, max(timeline.end_s, timeline.start_s + 1e-3) / scale)
    _draw_slots(slots, timeline, scale)
    _draw_publishes(slots, timeline, events, scale)
    _draw_ruler(ruler, timeline, events, scale)
    _draw_load(load, timeline, events, scale)
    load.set_xlabel(f"time since the start of the run ({unit})", color=INK)
    _draw_heading(figure, timeline, events, height_in)
    figure.savefig(path)
    return Path(path)


def _time_unit(wall_s: float) -> tuple[str, float]:
    if wall_s < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if wall_s < 4 * 3600 else ("hours", 3600.0)


def _draw_slots(axes: Axes, timeline: Timeline, scale: float) -> None:
    index_of = {slot: index for index, slot in enumerate(timeline.intervals)}
    count = len(index_of)
    half = 0.40 if count <= 24 else 0.44 if count <= 64 else 0.5
    least_s = timeline.wall_s / _MAX_POINTS / 2

    def boxes(rows: Iterable[tuple[int, Sequence[Interval]]], state: str) -> list[list[tuple[float, float]]]:
        return [
            _box(part.start_s / scale, part.end_s / scale, index_of[slot], half)
            for slot, row in rows
            for part in row
            if part.state == state
        ]

    busy = [(slot, _without_gaps(row, least_s)) for slot, row in timeline.busy.items()]
    for role in ROLES:
        _add_boxes(axes, boxes(timeline.intervals.items(), role), facecolor=PALE[role], linewidth=0)
        _add_boxes(axes, boxes(busy, role), facecolor=COLOURS[role], linewidth=0)
    _add_boxes(axes, boxes(timeline.intervals.items(), FAILED), facecolor=COLOURS[FAILED], linewidth=0)
    style = {"facecolor": "white", "edgecolor": HATCH, "hatch": "/////", "linewidth": 0.0}
    _add_boxes(axes, boxes(timeline.intervals.items(), SHIFTING), **style)
    axes.set_ylim(count - 0.4, -0.6)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, count) if count / n <= 32)
    axes.set_yticks(range(0, count, every), [str(slot) for slot in list(index_of)[::every]])
    axes.set_ylabel("slot", color=INK)
    axes.yaxis.set_label_coords(_LABEL_X, 0.5)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.tick_params(axis="y", length=0, labelcolor=MUTED)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _box(start: float, end: float, row: int, half: float) -> list[tuple[float, float]]:
    return [(start, row - half), (end, row - half), (end, row + half), (start, row + half)]


def _add_boxes(axes: Axes, boxes: Sequence[list[tuple[float, float]]], **style: Any) -> None:
    """Adds all ``boxes`` as one shape: thousands of hatched ones are slow to draw one by one."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if boxes:
        points = [point for box in boxes for point in (*box, box[0])]
        codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(boxes)
        axes.add_artist(PathPatch(Outline(points, codes), **style))


def _without_gaps(row: Sequence[Interval], least_s: float) -> list[Interval]:
    """``row`` with neighbours of one state joined when the gap between them would be narrower than a pixel."""
    joined: list[Interval] = []
    for part in row:
        if joined and joined[-1].state == part.state and part.start_s - joined[-1].end_s < least_s:
            joined[-1] = Interval(joined[-1].start_s, part.end_s, part.state)
        else:
            joined.append(part)
    return joined


def _draw_publishes(axes: Axes, timeline: Timeline, events: Sequence[Event], scale: float) -> None:
    """A tick and the policy version above the rows at the end of each publish."""
    from matplotlib.transforms import ScaledTranslation

    labelled_until_s = float("-inf")
    transform = axes.get_xaxis_transform()
    above = transform + ScaledTranslation(0, 4 / 72, axes.figure.dpi_scale_trans)
    for event in events:
        if event["kind"] != "publish":
            continue
        x = event["t_s"] / scale
        axes.plot(x, 1.0, marker=_TICK, transform=above, **_TICK_STYLE)
        axes.axvline(x, color=INK, linewidth=0.7, linestyle=(0, (1, 2)), alpha=0.75)
        if event["t_s"] >= labelled_until_s:
            label = f"v{event['version']}"
            axes.annotate(
                label, (x, 1.0), xycoords=transform, xytext=(0, 10), textcoords="offset points",
                ha="center", va="bottom", fontsize=8, color=INK, annotation_clip=False,
            )  # fmt: skip
            labelled_until_s = event["t_s"] + timeline.wall_s * 0.009 * (len(label) + 1)


def _draw_ruler(axes: Axes, timeline: Timeline, events: Sequence[Event], scale: float) -> None:
    """Alternating bands, one per training step."""
    steps = [e for e in events if e["kind"] == "step"]
    for index, step in enumerate(steps):
        start_s, end_s = step["t_s"] - step["wall_s"], step["t_s"]
        axes.axvspan(start_s / scale, end_s / scale, color=("#d3d7dc", BAND)[index % 2], linewidth=0)
        label = f"step {step['step']}" if end_s - start_s > 0.05 * timeline.wall_s else str(step["step"])
        if end_s - start_s > 0.008 * len(label) * timeline.wall_s:
            centre = (start_s + end_s) / 2 / scale
            axes.text(centre, 0.46, label, ha="center", va="center", fontsize=8, color=INK, clip_on=True)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0, labelbottom=False)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("steps", color=MUTED, rotation=0, ha="right", va="center", fontsize=8)


def _draw_load(axes: Axes, timeline: Timeline, events: Sequence[Event], scale: float) -> None:
    """Sequences running in the engines of each role, and (dotted) those that no engine has accepted yet."""
    times, running, queued = _load_curves(timeline, events)
    for role in INFERENCE_ROLES:
        x = [t_s / scale for t_s in times]
        axes.fill_between(x, running[role], color=COLOURS[role], alpha=0.16, linewidth=0)
        axes.plot(x, running[role], color=COLOURS[role], linewidth=1.5, label=f"{role} running")
        if any(queued[role]):
            style: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (1, 1.4)), "alpha": 0.9}
            axes.plot(x, queued[role], color=COLOURS[role], label=f"{role} queued", **style)
    highest = max((value for curve in (*running.values(), *queued.values()) for value in curve), default=0.0)
    axes.set_ylim(0, max(1.0, 1.28 * highest))
    axes.set_ylabel("sequences", color=INK)
    axes.yaxis.set_label_coords(_LABEL_X, 0.5)
    axes.grid(axis="y", color=BAND, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b9bdc4")
    if times:
        axes.legend(loc="upper right", ncols=4, fontsize=8, frameon=True, framealpha=0.85, edgecolor="none")


Curves = dict[str, list[float]]


def _load_curves(timeline: Timeline, events: Sequence[Event]) -> tuple[list[float], Curves, Curves]:
    """Times, running and queued sequences by role; means of equal stretches when there are too many samples."""
    samples = [(e["t_s"], load_by_role(e)) for e in events if e["kind"] == "load"]
    group = max(1, -(-len(samples) // _MAX_POINTS))
    groups = [samples[i : i + group] for i in range(0, len(samples), group)]
    times = [sum(t_s for t_s, _ in part) / len(part) for part in groups]

    def curves(name: str) -> Curves:
        return {role: [sum(s[name][role] for _, s in part) / len(part) for part in groups] for role in INFERENCE_ROLES}

    return times, curves("running"), curves("queued")


def _draw_heading(figure: Figure, timeline: Timeline, events: Sequence[Event], height_in: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    run_id = next((e["run_id"] for e in events if e["kind"] == "run_start"), "")
    fractions = timeline.busy_fraction()
    busy = ", ".join(f"{role} {fraction:.0%}" for role, fraction in fractions.items() if fraction is not None)
    steps = sum(e["kind"] == "step" for e in events)
    facts = [
        f"{len(timeline.intervals)} slots",
        f"{steps} steps",
        f"{timeline.wall_s:,.0f} s",
        f"{sum(shift_counts(events).values()):,} shifts",
        f"busy: {busy}",
        run_id,
    ]
    figure.text(0.062, 1 - 0.34 / height_in, "Roles of slots", fontsize=14, weight="bold", color=INK)
    figure.text(0.062, 1 - 0.62 / height_in, "   |   ".join(facts), fontsize=9.5, color=MUTED)
    handles: list[Any] = [Patch(facecolor=COLOURS[role], label=role) for role in ROLES]
    handles += [
        Patch(facecolor="#d8dade", label="pale: idle in its role"),
        Patch(facecolor="white", edgecolor=HATCH, hatch="/////", linewidth=0, label="shifting"),
        Patch(facecolor=COLOURS[FAILED], label="failed"),
        Line2D([], [], marker=_TICK, label="weights published", **_TICK_STYLE),
    ]
    figure.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(0.985, 1 - 0.16 / height_in), ncols=len(handles),
        frameon=False, fontsize=9, handlelength=1.5, handleheight=1.0, columnspacing=1.3, labelcolor=INK,
    )  # fmt: skip
