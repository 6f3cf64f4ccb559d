"""What the trainer mode does when nothing good comes any more; the rest of it is tested by whole runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl_pivot.vllm_ext import distribution

distribution.install()

from verl_pivot.runtime.training import TrainerState, TrainPhase  # noqa: E402
from verl_pivot.verl_ext.trainer import FAILED_BATCHES, PPOTrainerResourceShift  # noqa: E402

pytestmark = pytest.mark.contract


class Guarded(PPOTrainerResourceShift):
    def __init__(self) -> None:  # nothing of verl is started
        algorithm = {"filter_groups": {"enable": False}}
        rollout = {"rollout": {"n": 2}}
        self.config = OmegaConf.create(
            {"data": {"train_batch_size": 8}, "algorithm": algorithm, "actor_rollout_ref": rollout}
        )
        self.record = SimpleNamespace(prompts_dropped=self._drop, prompts_sampled=self._sample, prompts_open=20)
        self.deployment = SimpleNamespace(train_progress=self._hear, acquire_train=lambda ready, needed: None)
        self.heard: list[tuple[int, int, TrainerState]] = []
        self._ready = self.local_trigger_step = 0
        self.global_steps, self.total_training_steps = 1, 2
        self.timing_raw: dict[str, float] = {}
        self.dropped = self.submitted = 0
        self.parameter_sync_step = 1
        self._failed_in_a_row = 0
        self._holds_lease = True

    def _drop(self, count: int) -> None:
        self.dropped += count

    def _sample(self, count: int) -> None:
        self.record.prompts_open -= count

    def _hear(self, ready: int, needed: int, state: TrainerState) -> None:
        self.heard.append((ready, needed, state))

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        self.submitted += num_prompts
        return num_prompts


def test_failed_prompts_are_replaced_until_none_succeeds_any_more() -> None:
    trainer = Guarded()
    for _ in range(FAILED_BATCHES * 8 - 1):
        assert trainer._replace_failed(1) == 1
    with pytest.raises(RuntimeError, match="32 prompts in a row failed") as refusal:
        trainer._replace_failed(1)
    assert "custom_reward_function" in str(refusal.value)
    assert (trainer.dropped, trainer.submitted) == (32, 31)


def test_a_batch_that_can_be_trained_on_begins_the_count_anew() -> None:
    trainer = Guarded()
    for _ in range(5):
        trainer._replace_failed(FAILED_BATCHES * 8 - 1)
        trainer.on_sample_end()
    assert trainer.dropped == trainer.submitted == 5 * 31


def test_groups_that_were_filtered_are_no_failures() -> None:
    trainer = Guarded()
    trainer.config.algorithm.filter_groups.enable = True
    assert trainer._replace_failed(1000) == 1000


@pytest.mark.parametrize("step", [1, 2])
def test_the_planner_hears_what_training_does(step: int) -> None:
    """20 groups are submitted, 10 of them ready when a mini-batch of 4 is taken."""
    trainer = Guarded()
    trainer.parameter_sync_step, trainer.global_steps, trainer._holds_lease = 2, step, False
    trainer._tell(10)
    trainer.on_sample_end()
    trainer.local_trigger_step = 1
    trainer._tell(7)
    trainer._tell(trainer._ready, TrainPhase.PUBLISHING)
    new_prompts = 16 if step == 1 else 0  # with the last version nothing more comes
    told = [(ready, s.groups_open, s.batch, s.phase) for ready, _, s in trainer.heard]
    assert told == [
        (10, 10, 0, TrainPhase.WAITING),
        (10, 10, 0, TrainPhase.WAITING),
        (6, 10, 0, TrainPhase.UPDATING),
        (7, 9, 1, TrainPhase.WAITING),
        (7, 9, 2, TrainPhase.PUBLISHING),
    ]
    assert {(needed, s.batches_per_step, s.new_prompts) for _, needed, s in trainer.heard} == {(4, 2, new_prompts)}
