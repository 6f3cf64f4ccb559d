"""Draws ``docs/architecture.png``: the processes of a run and who talks to whom.

python docs/make_architecture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).with_name("architecture.png")

ROLLOUT, GENRM, TRAIN = "#2f6eb5", "#e98f2c", "#36976a"
OURS, THEIRS, INK, MUTED = "#eef3fa", "#f4f4f4", "#22222e", "#6a6a76"
Point = tuple[float, float]


def box(
    ax: Axes,
    corner: Point,
    size: Point,
    title: str,
    text: str = "",
    *,
    fill: str = THEIRS,
    edge: str = "#b9bcc6",
    top: bool = False,
    ink: str = INK,
    dashed: bool = False,
) -> None:
    """A box with a bold title and small text; ``top`` puts the title at the upper edge, leaving room below it."""
    (x, y), (w, h) = corner, size
    style = "round,pad=0,rounding_size=0.09"
    line = (0, (4, 3)) if dashed else "solid"
    ax.add_patch(FancyBboxPatch(corner, w, h, boxstyle=style, facecolor=fill, edgecolor=edge, lw=1.1, ls=line))
    if top:
        ax.text(x + 0.14, y + h - 0.13, title, ha="left", va="top", fontsize=9.5, weight="bold", color=ink)
        ax.text(x + 0.14, y + h - 0.42, text, ha="left", va="top", fontsize=8, color=MUTED, linespacing=1.35)
        return
    lines = text.count("\n") + 1 if text else 0
    ax.text(
        x + w / 2, y + h / 2 + 0.115 * lines, title, ha="center", va="center", fontsize=9.5, weight="bold", color=ink
    )
    if text:
        text_ink = MUTED if ink == INK else ink
        ax.text(
            x + w / 2, y + h / 2 - 0.13, text, ha="center", va="center", fontsize=8, color=text_ink, linespacing=1.3
        )


def arrow(
    ax: Axes, points: list[Point], label: str = "", at: Point | None = None, color: str = INK, **align: str
) -> None:
    """A line through ``points`` with a head at its end, and a label that hides what is under it."""
    xs, ys = zip(*points, strict=True)
    ax.plot(xs[:-1], ys[:-1], color=color, lw=1.3, solid_joinstyle="round")
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.3, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
    ax.annotate("", xy=points[-1], xytext=points[-2], arrowprops=style)
    if label and at is not None:
        where = {"ha": "center", "va": "center", **align}
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.4}
        ax.text(*at, label, fontsize=8, color=color, linespacing=1.25, bbox=paper, zorder=5, **where)


def draw_left(ax: Axes) -> None:
    box(
        ax, (0.2, 9.0), (3.2, 0.9), "driver", "main_ppo: completes and checks\nthe configuration, starts Ray", fill=OURS
    )
    box(ax, (0.2, 7.65), (3.2, 0.7), "TransferQueue", "one entry a response")
    box(
        ax,
        (0.2, 5.9),
        (3.2, 0.95),
        "agent loop workers",
        "our client: one response over\nas many engines as it takes",
        fill=OURS,
    )
    box(ax, (0.2, 4.25), (3.2, 0.9), "reward loop workers", "the user's reward function,\nunmodified")


def draw_middle(ax: Axes) -> None:
    trainer = "PPOTrainerResourceShift: verl's loop, our hooks;\nowns the parameter store"
    box(ax, (5.6, 8.6), (5.0, 1.3), "trainer process (verl's TaskRunner)", trainer, fill=OURS, edge=TRAIN)
    box(ax, (5.6, 4.4), (5.0, 2.95), "control plane (one actor)", fill=OURS, edge=INK, top=True)
    box(ax, (5.8, 5.95), (2.3, 0.85), "balancer", "gives out rollout\nengines", fill="white", edge=ROLLOUT)
    box(ax, (5.8, 4.55), (2.3, 0.85), "judge router", "OpenAI API: waits,\nsends again", fill="white", edge=GENRM)
    controller = "snapshot, plan,\nshift transactions\n\nslot states, lease,\nversions, recovery"
    box(ax, (8.4, 4.55), (2.05, 2.25), "controller", controller, fill="white", edge=INK)


def draw_slots(ax: Axes) -> None:
    slots = (
        (0.9, 4.2, "slot of the rollout pool", ((0.2, 1.8, "rollout", True), (2.2, 1.8, "judge", False))),
        (5.6, 4.2, "slot of the genrm pool", ((0.2, 1.8, "rollout", False), (2.2, 1.8, "judge", True))),
        (10.1, 5.75, "slot of the train pool", ((0.2, 1.7, "rollout", False), (2.05, 1.7, "judge", False))),
    )
    colours = {"rollout": ROLLOUT, "judge": GENRM}
    for x, width, title, engines in slots:
        box(ax, (x, 1.6), (width, 1.6), "", fill="white", edge=INK, top=True)
        at, side = (x + width - 0.2, "right") if engines[0][3] else (x + 0.2, "left")  # beside the arrow to the store
        ax.text(at, 1.81, title, ha=side, va="center", fontsize=8.5, weight="bold", color=INK)
        for shift, engine_width, role, awake in engines:
            fill, ink = (colours[role], "white") if awake else ("white", MUTED)
            state = "awake" if awake else "asleep"
            where, size = (x + shift, 2.05), (engine_width, 0.95)
            box(ax, where, size, f"{role} engine", state, fill=fill, edge=colours[role], ink=ink, dashed=not awake)
    box(ax, (14.0, 2.05), (1.65, 0.95), "actor worker", "FSDP / Megatron", fill=TRAIN, edge=TRAIN, ink="white")


def draw_store_and_outputs(ax: Axes) -> None:
    store = "policy/v6    policy/v7 (current)    judge/v0        safetensors files in tmpfs, one copy a node"
    box(ax, (0.9, 0.1), (14.95, 0.75), "parameter store", store, fill="#f3f0fa", edge="#7b68b0")
    files = "events.jsonl, trainer.jsonl;\nat the end report.json,\ntimeline.png, trace.json"
    box(ax, (12.3, 6.3), (3.0, 1.05), "run directory", files, fill=OURS)


def draw_arrows(ax: Axes) -> None:
    arrow(ax, [(3.4, 9.45), (5.6, 9.45)], "starts", (4.5, 9.45))
    arrow(ax, [(3.4, 8.0), (4.6, 8.0), (4.6, 8.85), (5.6, 8.85)], "finished groups", (4.6, 8.38))
    arrow(ax, [(6.1, 8.6), (6.1, 7.7), (3.9, 7.7), (3.9, 6.65), (3.4, 6.65)], "prompts", (5.1, 7.7))
    arrow(ax, [(1.2, 6.85), (1.2, 7.65)], "response\nand reward", (1.2, 7.23))
    arrow(ax, [(1.2, 5.9), (1.2, 5.15)], "response", (1.2, 5.55))
    arrow(ax, [(3.4, 6.35), (5.8, 6.35)], "acquire,\nrelease", (4.65, 6.35), ROLLOUT)
    arrow(ax, [(3.4, 4.95), (5.8, 4.95)], "HTTP", (4.75, 4.95), GENRM)
    generate = [(2.9, 5.9), (2.9, 5.45), (3.9, 5.45), (3.9, 3.95), (2.0, 3.95), (2.0, 3.0)]
    arrow(ax, generate, "generate", (3.0, 3.95), ROLLOUT)
    arrow(ax, [(7.0, 4.55), (7.0, 3.95), (8.7, 3.95), (8.7, 3.0)], "forward", (7.85, 3.95), GENRM)
    bus = 3.55
    for middle in (3.0, 7.7, 12.08):
        arrow(ax, [(9.8, 4.55), (9.8, bus), (middle, bus), (middle, 3.2)])
    arrow(
        ax,
        [(9.8, bus), (12.08, bus), (12.08, 3.2)],
        "drain, sleep, load, wake,\nkill, restart; load reports",
        (11.5, 3.85),
    )
    arrow(ax, [(9.8, 8.6), (9.8, 6.8)], "lease, progress,\nnew version", (9.8, 7.95))
    update = [(10.6, 9.5), (15.9, 9.5), (15.9, 4.6), (14.85, 4.6), (14.85, 3.0)]
    arrow(ax, update, "update,\nsend weights", (14.85, 4.2), TRAIN)
    arrow(ax, [(10.6, 8.9), (13.8, 8.9), (13.8, 7.35)], "steps, spans, publishes", (12.3, 8.9), MUTED)
    arrow(ax, [(10.6, 6.8), (12.3, 6.8)], "shifts, plans,\nloads", (11.42, 6.8), MUTED)
    arrow(ax, [(14.85, 2.05), (14.85, 0.85)], "publish v7 (rank 0)", (14.85, 1.25), TRAIN)
    arrow(ax, [(2.0, 0.85), (2.0, 2.05)], "read v7", (2.0, 1.25), ROLLOUT)
    arrow(ax, [(8.7, 0.85), (8.7, 2.05)], "read v0", (8.7, 1.25), GENRM)


def main() -> None:
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, ax = plt.subplots(figsize=(13.2, 8.2), dpi=140)
    ax.set_xlim(0, 16.4)
    ax.set_ylim(0, 10.05)
    ax.axis("off")
    for draw in (draw_left, draw_middle, draw_slots, draw_store_and_outputs, draw_arrows):
        draw(ax)
    figure.savefig(PICTURE, bbox_inches="tight", pad_inches=0.1)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
