"""Trainer mode ``resource_shift``: verl's PPO trainer, with GPUs that change role between and within steps.

Overrides hooks only (verl/trainer/ppo/v1/trainer_base.py). A step: prompts go out, responses and judgements stream in,
training takes its slots when a (mini-)batch is ready, publishes, and gives them back. ``staleness`` 0 waits for the
publish before the next prompts go out; ``k`` keeps k batches of prompts ahead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import transfer_queue.interface as tq_interface
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.utils import Role as VerlRole
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.profiler import marked_timer
from verl.workers.rollout.llm_server import LLMServerClient

from verl_pivot.config.completion import MODE, resource_shift_config
from verl_pivot.runtime.training import TrainerState, TrainPhase
from verl_pivot.verl_ext.deployment import Deployment
from verl_pivot.verl_ext.liveness import WatchedCalls
from verl_pivot.verl_ext.reward import ShiftRewardLoopManager
from verl_pivot.verl_ext.run_record import RunRecord
from verl_pivot.verl_ext.server_manager import NoServerManager
from verl_pivot.verl_ext.snapshot_worker import SnapshotActorWorker

logger = logging.getLogger(__name__)

COUNT_TIMEOUT_S = 10.0
FAILED_BATCHES = 4
"""Batches' worth of prompts that may fail before a run gives up: verl itself would replace them for ever."""


@register_trainer(MODE)
class PPOTrainerResourceShift(PPOTrainer):
    """Runs in verl's TaskRunner actor; owns the deployment (slots, engines, control plane) and the run's record."""

    # Rollout engines live on slots, never inside actor workers.
    _enable_hybrid_replicas = False

    def __init__(self, config: DictConfig) -> None:
        self.shift_config = resource_shift_config(config)
        super().__init__(config)
        self._watch_while_sampling()
        self.deployment: Deployment | None = None
        self._failed_in_a_row = 0
        self.record = RunRecord(config, self.shift_config)
        self._holds_lease = False
        self._ready = 0

    def _watch_while_sampling(self) -> None:
        """Poll often, and stop waiting when no sample can ever come.

        Wraps ReplayBuffer._wait_for_next_poll on this instance (verl/trainer/ppo/v1/replay_buffer.py): the buffer has
        no hook for its waiting, and its interval is not configurable. Remove when verl offers either.
        """
        self.replay_buffer.poll_interval = self.shift_config.train.poll_interval_s
        wait = self.replay_buffer._wait_for_next_poll

        def wait_and_check(partition_id: str, last_debug_time: float) -> float:
            self.deployment.check()
            if partition_id == "train":
                self._tell(len(self.replay_buffer.finished_keys[partition_id]))
            return wait(partition_id, last_debug_time)

        self.replay_buffer._wait_for_next_poll = wait_and_check
        self.replay_buffer.refill_fn = self._replace_failed

    def _replace_failed(self, num_prompts: int) -> int:
        """Groups that failed, or grew too old, were dropped with a reason; as many new prompts go out."""
        self.record.prompts_dropped(num_prompts)
        if not self.config.algorithm.get("filter_groups", {}).get("enable", False):
            self._failed_in_a_row += num_prompts  # else most of them were filtered, which is no failure
        limit = FAILED_BATCHES * self.config.data.train_batch_size
        if self._failed_in_a_row >= limit:
            raise RuntimeError(
                f"resource_shift: {self._failed_in_a_row} prompts in a row failed or grew too old, with no batch to "
                "train on between them; if reward.custom_reward_function.path raised, its traceback is in the log"
            )
        return self._add_prompts_to_generate(num_prompts)

    # ---- start-up -----------------------------------------------------------------------------------------------

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.shift_config.train.mini_batches_per_step > 1:
            # Keeps the weights of the step's start, against which later mini-batches compute old_log_probs.
            self.role_worker_mapping[VerlRole.Actor] = ray.remote(SnapshotActorWorker)
        self.deployment = Deployment(self.config, self.shift_config, self.record)
        self.deployment.add_pools(self.resource_pool_manager)

    def _setup(self) -> None:
        with _managers_on_slots(self):
            super()._setup()
        self.deployment.launch(self.resource_pool_manager, self.actor_rollout_wg)

    def on_init_end(self) -> None:
        self._publish()
        self.deployment.wait_until_served()
        if self.global_steps:
            resumes_from = self.config.trainer.resume_from_path
            named = self.config.trainer.resume_mode == "resume_path"
            self.deployment.load_lengths(Path(resumes_from) if named else self._checkpoint_folder(self.global_steps))
        self.deployment.start()

    def get_llm_client(self) -> LLMServerClient:
        return self.deployment.servers.get_client()

    def _rollout_server_managers(self) -> list[Any]:
        return [self.deployment.servers]

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """verl's loop; whatever ends it, engines, shared memory and the record are put in order."""
        outcome = "failed"
        self.deployment.watch_workers(_workers(agent_loop_manager, self.reward_loop_manager) | _sample_keepers())
        self.record.prompts_submitted(self._restored_tq_prompt_count)
        try:
            with WatchedCalls(self.deployment.check_workers):
                super().fit(agent_loop_manager)
            outcome = "finished"
        except (KeyboardInterrupt, SystemExit):  # Ray ends its workers with SIGTERM when the driver is interrupted
            outcome = "interrupted"
            raise
        finally:
            self.record.close(outcome, _prompts_in_flight())
            self.deployment.close()
            self.record.write_outputs()

    # ---- hooks of a step ----------------------------------------------------------------------------------------

    def on_train_begin(self) -> None:
        self._add_async_warmup_batches(self.shift_config.staleness)

    def on_step_begin(self) -> None:
        self.record.step_begins()

    def on_sample_begin(self) -> None:
        ready, needed = self._groups_ready(), self._groups_needed()
        if self._holds_lease and ready < needed:
            self._release_lease()
        self._tell(ready)

    def on_sample_end(self) -> None:
        self._failed_in_a_row = 0
        needed = self._groups_needed()
        self.record.prompts_sampled(needed)
        left = max(0, self._ready - needed)
        if not self._holds_lease:
            with marked_timer("acquire_slots", self.timing_raw, color="cyan"):
                self._tell(left + needed, taken=needed)
                self.deployment.acquire_train(left + needed, needed)
            self._holds_lease = True
        self._tell(left, TrainPhase.UPDATING)

    def on_step_end(self) -> None:
        self._tell(self._ready, TrainPhase.PUBLISHING)
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = self._publish()
            # The slots of training go back while the other engines still load the new version.
            self._release_lease()
            if self.shift_config.staleness == 0:
                self.deployment.wait_until_served()

    def on_validate_begin(self) -> None:
        self.deployment.wait_until_served()
        if self._holds_lease:
            self._release_lease()

    def _release_lease(self) -> None:
        self.deployment.release_train()
        self._holds_lease = False

    def _tell(self, ready: int, phase: TrainPhase = TrainPhase.WAITING, taken: int = 0) -> None:
        """Tell the planner how far training is. ``taken``: groups among those ready that have left the buffer."""
        self._ready = ready
        steps_on = self.config.data.train_batch_size if self.global_steps < self.total_training_steps else 0
        state = TrainerState(
            phase,
            groups_open=max(0, self.record.prompts_open - ready + taken),
            batch=self.parameter_sync_step if phase is TrainPhase.PUBLISHING else self.local_trigger_step,
            batches_per_step=self.parameter_sync_step,
            new_prompts=steps_on * self.config.actor_rollout_ref.rollout.n,
        )
        self.deployment.train_progress(ready, self._groups_needed(), state)

    def _publish(self) -> dict[str, float]:
        """Publish the actor's weights as version ``global_steps``; awake engines begin to load them."""
        start_s = time.perf_counter()
        metrics: dict[str, float] = {}
        with self.record.span("publish"):
            for sent in ray.get(self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode="auto")):
                metrics.update(sent or {})
        self.record.published(self.global_steps, metrics.get("publish_bytes", 0.0), time.perf_counter() - start_s)
        self.deployment.serve(self.global_steps)
        return {f"{MODE}/{name}": value for name, value in metrics.items()}

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        # An engine that still serves the version before would begin these responses one version staler than promised.
        self.deployment.wait_until_served()
        submitted = super()._submit_batch_to_rollout(batch)
        self.record.prompts_submitted(submitted)
        return submitted

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """All mini-batches of a step measure against the weights that the step began with (decoupled PPO).

        Follows PPOTrainerSeparateAsync._compute_old_log_prob (verl/trainer/ppo/v1/trainer_separate_async.py:187), which
        cannot be called from here: its ``super()`` refuses an object of another class, and a trainer of that class
        launches rollout servers of its own. Remove when verl moves it to PPOTrainer.
        """
        correction = self.config.algorithm.get("rollout_correction", None)
        bypass = bool(correction and correction.get("bypass_mode", False))
        with self.record.span("old_log_prob"):
            if self.parameter_sync_step == 1 or bypass:
                return super()._compute_old_log_prob(batch, metrics)
            if self.local_trigger_step == 0:
                self.actor_rollout_wg.save_model_to_cpu(0)
                return super()._compute_old_log_prob(batch, metrics)
            self.actor_rollout_wg.save_model_to_cpu(self.local_trigger_step)
            self.actor_rollout_wg.restore_model_from_cpu(0)
            result = super()._compute_old_log_prob(batch, metrics)
            self.actor_rollout_wg.restore_model_from_cpu(self.local_trigger_step)
            self.actor_rollout_wg.clear_cpu_model(self.local_trigger_step)
            return result

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.record.span("ref_log_prob"):
            return super()._compute_ref_log_prob(batch, metrics)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.record.span("values"):
            return super()._compute_values(batch, metrics)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.record.span("update_critic"):
            return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.record.span("update_actor"):
            return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        with self.record.span("save_checkpoint"):
            super()._save_checkpoint()
            self.deployment.save_lengths(self._checkpoint_folder(self.global_steps))

    def _checkpoint_folder(self, step: int) -> Path:
        """Where verl keeps the checkpoint of ``step`` (verl/trainer/ppo/v1/trainer_base.py:953)."""
        return Path(self.config.trainer.default_local_dir, f"global_step_{step}")

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        metrics.update(self.deployment.metrics())
        self.record.step_ends(batch, metrics, timing_raw, global_steps)

    # ---- counts -------------------------------------------------------------------------------------------------

    def _groups_ready(self) -> int:
        return self.replay_buffer.get_sampleable_count(self.global_steps, "train")

    def _groups_needed(self) -> int:
        return self.config.data.train_batch_size // self.parameter_sync_step


def _workers(*managers: object) -> dict[str, object]:
    """Ray actors that generate and judge for the trainer."""
    found: dict[str, object] = {}
    for kind in ("agent_loop_workers", "reward_loop_workers"):
        for manager in managers:
            for number, worker in enumerate(getattr(manager, kind, None) or ()):
                found[f"{kind.removesuffix('s').replace('_', ' ')} {number}"] = worker
    return found


def _sample_keepers() -> dict[str, object]:
    """Ray actors of TransferQueue, which hold prompts and responses (transfer_queue/interface.py keeps their handles
    in the process that started them: this one)."""
    keepers: dict[str, object] = {"the TransferQueue controller": tq_interface._TQ_CONTROLLER}
    for backend, units in (tq_interface._TQ_STORAGE or {}).items():
        if isinstance(units, dict):
            keepers |= {f"TransferQueue's {backend} unit {key}": unit for key, unit in units.items()}
    return keepers


def _prompts_in_flight() -> int | None:
    """None when the queue does not tell: it is asked without a deadline, and may be what the run ends of."""
    counted: list[int] = []

    def count() -> None:
        try:
            counted.append(trainer_base._count_tq_prompt_groups())
        except Exception:
            logger.exception("resource_shift: prompts in flight could not be counted")

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(COUNT_TIMEOUT_S)
    return counted[0] if counted else None


@contextlib.contextmanager
def _managers_on_slots(trainer: PPOTrainerResourceShift) -> Iterator[None]:
    """Make ``PPOTrainer._setup`` construct our managers of rewards and of inference servers.

    verl names RewardLoopManager (verl/trainer/ppo/v1/trainer_base.py:347) and LLMServerManager
    (verl/trainer/ppo/v1/trainer_base.py:378) directly and has no hook for them; the names are put back at once. Remove
    when verl lets a trainer choose the classes.
    """
    originals = trainer_base.RewardLoopManager, trainer_base.LLMServerManager
    ShiftRewardLoopManager.trainer = trainer
    trainer_base.RewardLoopManager, trainer_base.LLMServerManager = ShiftRewardLoopManager, NoServerManager
    try:
        yield
    finally:
        trainer_base.RewardLoopManager, trainer_base.LLMServerManager = originals
