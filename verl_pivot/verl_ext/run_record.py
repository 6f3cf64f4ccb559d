"""What the trainer process writes about a run: steps, training spans, publishes, and the counts that must add up."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from verl_pivot.config.files import RUN_LOCK
from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.observe.events import EventLog
from verl_pivot.store.locks import try_lock

logger = logging.getLogger(__name__)

_PROBS_DIFF = "training/rollout_probs_diff_max"


class RunRecord:
    """Writes ``trainer.jsonl`` beside the control plane's ``events.jsonl``.

    Raises RuntimeError when another run that is going on writes to the same folder.
    """

    def __init__(self, config: DictConfig, shift_config: ResourceShiftConfig) -> None:
        self._observe = shift_config.observe
        self.directory = Path(self._observe.directory) / str(config.trainer.experiment_name)
        self.directory = self.directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / RUN_LOCK).touch()
        lock = try_lock(self.directory / RUN_LOCK)
        if lock is None:
            raise RuntimeError(
                f"resource_shift: another run is writing to {self.directory}; give this one another "
                "trainer.experiment_name, or another trainer.resource_shift.observe.directory"
            )
        self._lock = lock
        self.t0_unix_s = time.time()
        self._log = EventLog(self.directory / "trainer.jsonl", t0_unix_s=self.t0_unix_s)
        self._submitted = 0
        self._in_training = 0
        self._trained = 0
        self._dropped = 0
        self._responses = 0
        self._rewards = 0
        self._step_start_s = self._log.now_s()

    # ---- counts and events --------------------------------------------------------------------------------------

    def prompts_submitted(self, count: int) -> None:
        self._submitted += count

    def prompts_sampled(self, count: int) -> None:
        """Groups that left the replay buffer for the present step; one that fails never trains on them."""
        self._in_training += count

    def prompts_dropped(self, count: int) -> None:
        """Groups that failed or grew too old: dropped by the replay buffer, replaced, not lost."""
        self._dropped += count

    @property
    def prompts_open(self) -> int:
        """Groups that are under way or ready: submitted, and neither dropped nor taken by a step."""
        return self._submitted - self._dropped - self._trained - self._in_training

    def step_begins(self) -> None:
        self._step_start_s = self._log.now_s()

    def published(self, version: int, published_bytes: float, publish_s: float) -> None:
        self._log.emit("publish", version=version, bytes=int(published_bytes), duration_s=publish_s)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Busy time of the training unit."""
        start_s = self._log.now_s()
        try:
            yield
        finally:
            self._log.emit("span", role="train", name=name, t_start_s=start_s, duration_s=self._log.now_s() - start_s)

    def step_ends(self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], step: int) -> None:
        """One event a step, from the batch that was trained on."""
        real = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        prompts = {key.split("_")[0] for key, _ in real}
        self._trained += len(prompts)
        self._in_training = 0
        scores, extra = self._rewards_of([key for key, _ in real], batch.partition_id)
        rewards = [score for score in scores if math.isfinite(score)]
        if len(rewards) < len(scores):
            logger.warning(
                "resource_shift: step %d: %d of %d rewards are no finite numbers, and verl skips updates that they "
                "spoil; mend reward.custom_reward_function",
                step,
                len(scores) - len(rewards),
                len(scores),
            )
        self._responses += len(real)
        self._rewards += len(rewards)
        self._log.emit(
            "step",
            step=step,
            wall_s=self._log.now_s() - self._step_start_s,
            prompts=len(prompts),
            responses=len(real),
            rewards=len(rewards),
            response_tokens=int(sum(tag["response_len"] for _, tag in real)),
            reward_mean=_mean(rewards),
            accuracy=_mean([info["acc"] for info in extra if "acc" in info]),
            judge_agreement=_mean([info["judge_agrees"] for info in extra if "judge_agrees" in info]),
            probs_diff_max=_number(metrics.get(_PROBS_DIFF)),
            policy_version=step,
            timing={name: float(value) for name, value in timing_raw.items()},
        )

    def _rewards_of(self, keys: list[str], partition_id: str) -> tuple[list[float], list[dict[str, Any]]]:
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores", "extra_fields"])
        scores = [float(value.sum()) for value in data["rm_scores"]]
        extra = []
        for value in list(data["extra_fields"]):
            fields = getattr(value, "data", value)
            info = fields.get("reward_extra_info", {}) if isinstance(fields, dict) else {}
            extra.append(info)
        return scores, extra

    def close(self, outcome: str, prompts_in_flight: int | None) -> None:
        """``lost`` counts prompts that were neither trained on, nor dropped with a reason, nor still on their way;
        unknown where ``prompts_in_flight`` is."""
        lost = None
        if prompts_in_flight is not None:
            prompts_in_flight += self._in_training
            lost = self._submitted - self._trained - self._dropped - prompts_in_flight
        self._log.emit(
            "run_end",
            outcome=outcome,
            lost=lost,
            prompts=self._trained,
            responses=self._responses,
            rewards=self._rewards,
            submitted=self._submitted,
            dropped=self._dropped,
            in_flight=prompts_in_flight,
        )
        self._log.close()

    def forward(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Also tell ``listener`` what the per-step metrics are made of."""
        self._log.subscribe(lambda event: listener(event) if event["kind"] in ("span", "publish") else None)

    def write_outputs(self) -> None:
        """report.json, timeline.png, trace.json, and the summary table on the console."""
        from rich.console import Console

        from verl_pivot.observe.report import write_outputs
        from verl_pivot.observe.summary import render_summary

        try:
            paths = write_outputs(self.directory, png=self._observe.timeline_png, trace=self._observe.perfetto_trace)
        except Exception:  # a run that is over must not fail because of its report
            logger.exception("resource_shift: the report of %s could not be written", self.directory)
            return
        console = Console(width=120)
        console.print(render_summary(json.loads(paths["report"].read_text(encoding="utf-8"))))
        for path in paths.values():
            console.print(f"wrote {path}")


def _mean(values: list[Any]) -> float | None:
    numbers = [float(value) for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
