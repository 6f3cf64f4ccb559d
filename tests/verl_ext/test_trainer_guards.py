"""What the trainer mode does when nothing good comes any more; the rest of it is tested by whole runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl_pivot.vllm_ext import distribution

distribution.install()

from verl_pivot.verl_ext.trainer import FAILED_BATCHES, PPOTrainerResourceShift  # noqa: E402

pytestmark = pytest.mark.contract


class Guarded(PPOTrainerResourceShift):
    def __init__(self) -> None:  # nothing of verl is started
        algorithm = {"filter_groups": {"enable": False}}
        self.config = OmegaConf.create({"data": {"train_batch_size": 8}, "algorithm": algorithm})
        self.record = SimpleNamespace(prompts_dropped=self._drop, prompts_sampled=lambda count: None)
        self.dropped = self.submitted = 0
        self.parameter_sync_step = 1
        self._failed_in_a_row = 0
        self._holds_lease = True

    def _drop(self, count: int) -> None:
        self.dropped += count

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
