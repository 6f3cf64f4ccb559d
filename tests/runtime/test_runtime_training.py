"""What a snapshot says of training, from what the trainer says and when."""

from __future__ import annotations

import pytest

from verl_pivot.core.snapshot import LeaseState
from verl_pivot.runtime.training import TrainerState, TrainingWatch, TrainPhase

FREE, WANTED, HELD = LeaseState.FREE, LeaseState.WANTED, LeaseState.HELD
WAITING, UPDATING, PUBLISHING = TrainPhase.WAITING, TrainPhase.UPDATING, TrainPhase.PUBLISHING


def say(watch: TrainingWatch, phase: TrainPhase, batch: int, now_s: float) -> None:
    watch.says(TrainerState(phase, groups_open=7, batch=batch, batches_per_step=2, new_prompts=64), now_s)


def one_step(watch: TrainingWatch, start_s: float = 0.0) -> float:
    """Two batches of 3 s and 5 s, 10 s of waiting before each, and a publish of 1 s; returns the end."""
    say(watch, WAITING, 0, start_s)
    say(watch, UPDATING, 0, start_s + 10)
    say(watch, WAITING, 1, start_s + 13)
    say(watch, UPDATING, 1, start_s + 23)
    say(watch, PUBLISHING, 2, start_s + 28)
    watch.released(start_s + 29)
    return start_s + 29


def test_nothing_is_predicted_before_it_was_measured() -> None:
    watch = TrainingWatch()
    say(watch, UPDATING, 0, 0.0)
    view = watch.view(HELD, 1.0)
    assert (view.update_s, view.busy_s) == (0.0, 0.0)
    assert (view.groups_open, view.batches_per_step, view.new_prompts) == (7, 2, 64)


def test_updates_and_publishes_are_predicted_from_their_median() -> None:
    watch = TrainingWatch()
    end_s = one_step(watch)
    assert watch.view(FREE, end_s).update_s == pytest.approx(4.0)
    one_step(watch, end_s)
    say(watch, UPDATING, 0, 100.0)
    say(watch, WAITING, 1, 200.0)  # this one held a checkpoint
    assert watch.view(FREE, 200.0).update_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("phase", "batch", "after_s", "busy_s", "to_publish"),
    [
        (WAITING, 0, 3.0, 0.0, 2),
        (UPDATING, 0, 1.0, 3.0, 2),
        (UPDATING, 1, 1.0, 4.0, 1),  # and the publish
        (UPDATING, 1, 9.0, 1.0, 1),
        (PUBLISHING, 2, 0.25, 0.75, 1),
    ],
)
def test_how_long_training_is_still_busy(
    phase: TrainPhase, batch: int, after_s: float, busy_s: float, to_publish: int
) -> None:
    watch = TrainingWatch()
    one_step(watch)
    say(watch, phase, batch, 50.0)
    view = watch.view(HELD, 50.0 + after_s)
    assert (view.busy_s, view.batches_to_publish) == (pytest.approx(busy_s), to_publish)


def test_how_long_the_lease_has_been_wanted() -> None:
    watch = TrainingWatch()
    assert watch.view(FREE, 1.0).wanted_s == 0.0
    assert watch.view(WANTED, 2.0).wanted_s == 0.0
    assert watch.view(WANTED, 5.0).wanted_s == 3.0
    assert watch.view(HELD, 6.0).wanted_s == 0.0
    assert watch.view(WANTED, 9.0).wanted_s == 0.0


def test_a_batch_becomes_ready_once() -> None:
    watch = TrainingWatch()
    assert [watch.progress(ready, 4) for ready in (3, 4, 5)] == [False, True, False]
    watch.released(0.0)
    assert watch.groups_ready == 0
    assert watch.progress(4, 4)
