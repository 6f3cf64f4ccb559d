"""Everything a run deploys beside verl's actor: parameter store, control plane, engines on slots.

Lives in the trainer process (verl's TaskRunner actor), which owns the store; methods are called by the trainer's hooks
and block until the control plane has answered.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.actor import ActorHandle
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.ppo.utils import Role as VerlRole
from verl.utils.device import get_device_name
from verl.utils.fs import copy_to_local

from verl_pivot.config.completion import BACKEND
from verl_pivot.config.layout import layout_from_config
from verl_pivot.config.lookup import to_plain
from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.core.registry import looks_at_lengths
from verl_pivot.runtime import janitor
from verl_pivot.runtime.training import TrainerState
from verl_pivot.store import ParameterStore
from verl_pivot.verl_ext import length_file
from verl_pivot.verl_ext.control_plane import ControlPlane, Workload
from verl_pivot.verl_ext.engine_host import EngineHost
from verl_pivot.verl_ext.liveness import WorkerWatch
from verl_pivot.verl_ext.replica import place_anchors
from verl_pivot.verl_ext.run_record import RunRecord
from verl_pivot.verl_ext.server_manager import SlotServerManager, release_anchors

logger = logging.getLogger(__name__)

SHARED_POOL = "shift_pool"
CHECK_INTERVAL_S = 2.0
ANSWER_TIMEOUT_S = 60.0
WORD_INTERVAL_S = 30.0
"""How often a long wait says what it waits for."""
QUIET_S = 60.0
"""Without a new finished group for so long, the trainer says where the others are."""
CLOSE_TIMEOUT_S = 30.0
CONTROL_CONCURRENCY = 100_000  # one waiting coroutine for each sequence that waits for a server


class Deployment:
    """Start order: store and control plane (now), pools, verl's actor, engines, first version, roles."""

    def __init__(self, config: DictConfig, shift_config: ResourceShiftConfig, record: RunRecord) -> None:
        self._config = config
        self._shift = shift_config
        self._record = record
        self.layout = layout_from_config(to_plain(config))
        self._with_judge = bool(config.reward.reward_model.enable)
        self._on_cpu = get_device_name() == "cpu"
        self._policy_dir = copy_to_local(config.actor_rollout_ref.model.path)
        self.store = ParameterStore.create(shift_config.store)
        janitor.start(self.store.run_dir)
        self._tell_actor_the_store()
        self.host = self._start_host()
        self.control_plane: ActorHandle = (
            ray.remote(ControlPlane)
            .options(num_cpus=0, max_concurrency=CONTROL_CONCURRENCY, name=f"control_plane_{self.store.run_id}")
            .remote(
                shift_config,
                str(record.directory),
                str(self.store.run_dir),
                record.t0_unix_s,
                self._with_judge,
                len(self.layout.slots) if self._on_cpu else 0,
                _workload(config),
            )
        )
        record.forward(lambda event: self.control_plane.observe.remote(event))
        self._router_ref = self.control_plane.start_router.remote()
        self.servers: SlotServerManager | None = None
        self._checked_s = 0.0
        self._watch = WorkerWatch({})
        self._progress = (0, 0)
        self._state: TrainerState | None = None
        self._quiet_since_s = time.monotonic()
        self._serving: ray.ObjectRef | None = None

    # ---- start-up -----------------------------------------------------------------------------------------------

    def router_address(self) -> str | None:
        """``host:port`` of the judge's HTTP API; it answers (by waiting) before any judge is awake."""
        return ray.get(self._router_ref)

    def add_pools(self, pools: ResourcePoolManager) -> None:
        """Rollout and reward pools become one shared pool of slots; the train pool stays verl's."""
        spec = pools.resource_pool_spec
        spec.pop("reward_pool", None)
        rollout, judge = self._config.actor_rollout_ref.rollout, self._config.reward.reward_model
        shared = [rollout.n_gpus_per_node] * rollout.nnodes if self.layout.rollout_slots else []
        if self.layout.genrm_slots:
            shared += [judge.n_gpus_per_node] * judge.nnodes
        if shared:
            spec[SHARED_POOL] = shared
        pools.mapping[VerlRole.RewardModel] = SHARED_POOL if shared else "global_pool"

    def launch(self, pools: ResourcePoolManager, actor: RayWorkerGroup) -> None:
        """Launch engines (asleep) on every slot and hand them to the control plane."""
        if self._with_judge:
            self.store.import_model("judge", copy_to_local(self._config.reward.reward_model.model_path))
        device = get_device_name()
        anchors = place_anchors(pools.resource_pool_dict["global_pool"], device)
        if SHARED_POOL in pools.resource_pool_dict:
            anchors += place_anchors(pools.resource_pool_dict[SHARED_POOL], device)
        _require_one_node(anchors)
        server_kwargs = {"kv_cache_bytes": self._shift.engine.kv_cache_bytes} if self._on_cpu else {}
        self.servers = SlotServerManager(
            self._config, self.layout, anchors, self.control_plane, self.host, server_kwargs
        )
        descriptions = self.servers.launch()
        release_anchors(anchors)
        slots = [{"slot": d.slot_id, "role": d.first_role, "can_host": list(d.can_host)} for d in descriptions]
        run_start = {
            "run_id": self.store.run_id,
            "slots": slots,
            "config": OmegaConf.to_container(OmegaConf.structured(self._shift)),
        }
        ray.get(self.control_plane.configure.remote(descriptions, run_start))
        self._place_actor(actor)

    def _place_actor(self, actor: RayWorkerGroup) -> None:
        pids = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in actor.workers])
        per_slot = self.layout.gpus_per_slot
        pids_of_slot: dict[int, list[int]] = {}
        for rank, pid in enumerate(pids):
            pids_of_slot.setdefault(rank // per_slot, []).append(pid)
        enforced = ray.get(self.control_plane.place_trainer.remote(pids_of_slot))
        logger.warning("resource_shift: %d slots, %s", len(self.layout.slots), enforced)

    def _start_host(self) -> ActorHandle | None:
        wanted = self._shift.engine.host
        if wanted == "per_replica" or (wanted == "auto" and not self._on_cpu):
            return None
        host = ray.remote(EngineHost).options(num_cpus=0, max_concurrency=CONTROL_CONCURRENCY).remote()
        host.ready.remote()  # imports vLLM while verl builds its actor
        return host

    def _tell_actor_the_store(self) -> None:
        engine = self._config.actor_rollout_ref.rollout.checkpoint_engine
        with open_dict(self._config):
            engine.engine_kwargs[BACKEND] = {
                "run_dir": str(self.store.run_dir),
                "hf_dir": self._policy_dir,
                "store": OmegaConf.to_container(OmegaConf.structured(self._shift.store)),
            }

    # ---- while running ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._await(self.control_plane.start.remote(), "the first roles have been taken")

    def acquire_train(self, groups_ready: int, groups_needed: int) -> float:
        return self._await(
            self.control_plane.acquire_train.remote(groups_ready, groups_needed), "training waits for its slots"
        )

    def release_train(self) -> None:
        self._ask("release_train")

    def train_progress(self, groups_ready: int, groups_needed: int, state: TrainerState) -> None:
        """Tell the planner, when it changed, how far the next batch is and what the trainer does."""
        if (groups_ready, groups_needed) != self._progress:
            self._progress = (groups_ready, groups_needed)
            self._quiet_since_s = time.monotonic()
        elif state == self._state:
            return
        self._state = state
        self.control_plane.train_progress.remote(groups_ready, groups_needed, state)

    def serve(self, version: int) -> None:
        """The store holds ``version``: awake rollout engines begin to load it, others will when they wake."""
        self.wait_until_served()
        self._serving = self.control_plane.publish.remote(version)

    def wait_until_served(self) -> None:
        """Returns when every awake rollout engine serves the version of the last ``serve``."""
        if self._serving is not None:
            self._await(self._serving, "engines load the published version")
            self._serving = None

    def save_lengths(self, folder: Path) -> None:
        """What was learned of lengths, beside the checkpoint in ``folder``. A run that does not predict them writes
        nothing."""
        state = self._ask("length_state")
        if state is not None:
            length_file.write(folder, state)

    def load_lengths(self, folder: Path) -> None:
        """Go on with what the checkpoint in ``folder`` knows of lengths; without it they are learned anew."""
        if looks_at_lengths(self._shift.planner.name) and (state := length_file.read(folder)) is not None:
            problem = _answer(self.control_plane.load_length_state.remote(state), "load_length_state")
            if problem is not None:
                length_file.warn(folder, problem)

    def watch_workers(self, workers: Mapping[str, object]) -> None:
        """From now on ``check_workers`` notices when one of these is gone."""
        self._watch = WorkerWatch(workers)

    def check_workers(self) -> None:
        """Raises RuntimeError when an actor that generates, judges or holds samples is gone. Never waits."""
        self._watch.check()

    def check(self) -> None:
        """Called while the trainer waits for samples.

        Raises RuntimeError when nothing will ever come: a role has no slot left, or the control plane is gone.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        self._require_hope()
        if now_s - self._quiet_since_s > QUIET_S:
            self._quiet_since_s = now_s
            ready, needed = self._progress
            logger.warning(
                "resource_shift: no group became ready for %.0f s (%d of %d are); %s",
                QUIET_S,
                ready,
                needed,
                self._ask("whereabouts"),
            )

    def metrics(self) -> dict[str, float]:
        return self._ask("metrics")

    def _require_hope(self) -> None:
        reason = self._ask("hopeless")
        if reason is not None:
            raise RuntimeError(f"resource_shift: {reason}")

    def _await(self, call: ray.ObjectRef, what: str) -> Any:
        """Result of a call that may rightly take long. Says now and then what it waits for, and raises RuntimeError
        when it waits in vain."""
        started_s = time.monotonic()
        while not ray.wait([call], timeout=WORD_INTERVAL_S)[0]:
            self._require_hope()
            waited_s = time.monotonic() - started_s
            logger.warning("resource_shift: %s since %.0f s; %s", what, waited_s, self._ask("whereabouts"))
        return _answer(call, what)

    def _ask(self, method: str) -> Any:
        """Answer of the control plane to what it answers at once."""
        return _answer(getattr(self.control_plane, method).remote(), method)

    def close(self) -> None:
        """Stop the control plane, end the engines, empty the store. Never raises: it runs while a run ends."""
        for actor, method in ((self.control_plane, "stop"), (self.host, "shutdown")):
            if actor is None:
                continue
            try:
                ray.get(getattr(actor, method).remote(), timeout=CLOSE_TIMEOUT_S)
            except Exception:
                logger.exception("resource_shift: %s did not end cleanly", method)
        self.store.close()


def _answer(call: ray.ObjectRef, what: str) -> Any:
    way_on = "resume from the last checkpoint"
    try:
        return ray.get(call, timeout=ANSWER_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(
            f"resource_shift: the control plane hangs ({what}: no answer for {ANSWER_TIMEOUT_S:g} s); {way_on}"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"resource_shift: the control plane is gone; {way_on} ({error})") from error


def _workload(config: DictConfig) -> Workload:
    """More sequences than an engine decodes at a time wait before the engines."""
    rollout = config.actor_rollout_ref.rollout
    engines = {"rollout": rollout}
    if config.reward.reward_model.enable:
        engines["genrm"] = config.reward.reward_model.rollout
    return Workload(
        {role: engine.max_num_seqs * engine.data_parallel_size for role, engine in engines.items()},
        {role: int(engine.response_length) for role, engine in engines.items()},
        int(rollout.n),
    )


def _require_one_node(anchors: list[ActorHandle]) -> None:
    """Raises RuntimeError when Ray placed a pool on another node: its engines could not read the parameter store."""
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.get(
        [anchor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for anchor in anchors]
    )
    elsewhere = sorted({node for node in nodes if node != here})
    if elsewhere:
        astray = sum(node != here for node in nodes)
        raise RuntimeError(
            f"resource_shift: {astray} of {len(nodes)} GPUs were placed on other nodes than the trainer"
            f" ({', '.join(elsewhere)}), but the parameter store shares weights on one node only; start Ray "
            "with all GPUs of the run on the trainer's node"
        )
