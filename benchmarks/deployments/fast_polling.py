"""verl's replay buffers with the poll interval that resource_shift uses, through ``trainer.v1.sampler.custom_sampler``.

verl polls every 2 s (trainer/ppo/v1/replay_buffer.py:144), which at steps of some ten seconds would cost its
deployments more than what is measured here. With this sampler all deployments notice a ready batch equally fast.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_INTERVAL_S = 0.05


class FastReplayBuffer(ReplayBuffer):
    """For ``trainer_mode=sync``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "poll_interval": POLL_INTERVAL_S})


class FastReplayBufferAsync(ReplayBufferAsync):
    """For ``trainer_mode=separate_async``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "poll_interval": POLL_INTERVAL_S})
