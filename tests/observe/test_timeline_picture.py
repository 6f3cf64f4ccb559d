"""The picture is drawn, shows the states it should, and stays fast on many slots."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from verl_pivot.observe.kinds import FAILED
from verl_pivot.observe.picture import COLOURS, PALE, draw_timeline


def share_of(image, colour):
    """Share of the picture's pixels that have ``colour``."""
    return float((np.abs(image[::3, ::3, :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.01).mean())


@pytest.mark.parametrize("slots", [1, 4])
def test_every_role_shows_busy_and_idle(made_up_run, tmp_path, slots):
    image = imread(draw_timeline(made_up_run(slots, 3), tmp_path / "timeline.png"))
    assert image.shape[1] == 1950
    for role in ("rollout", "genrm", "train") if slots > 1 else ("rollout",):
        assert share_of(image, COLOURS[role]) > 0.005
        assert share_of(image, PALE[role]) > 0.001
    if slots == 4:
        assert share_of(image, COLOURS[FAILED]) > 0.005


def test_a_slot_that_is_never_busy_is_pale(made_up_run, tmp_path):
    events = [e for e in made_up_run(4, 1) if e["kind"] != "load"]
    image = imread(draw_timeline(events, tmp_path / "timeline.png"))
    assert share_of(image, PALE["rollout"]) > 0.1
    assert share_of(image, COLOURS["rollout"]) < 0.01


def test_128_slots_take_less_than_five_seconds(made_up_run, tmp_path):
    events = made_up_run(128, 4)
    began_s = time.process_time()
    draw_timeline(events, tmp_path / "timeline.png")
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize("events_kept", [1, 2, 40])
def test_a_run_killed_early_can_be_drawn(made_up_run, tmp_path, events_kept):
    path = draw_timeline(made_up_run(4, 1)[:events_kept], tmp_path / "timeline.png")
    assert path.stat().st_size > 10_000
