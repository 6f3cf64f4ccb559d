"""The one configuration tree: ``trainer.resource_shift``. Unknown keys fail; there are no environment switches."""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_SHARD_BYTES = 1 << 20
MIN_CPU_SHARE = 0.05
MIN_KV_CACHE_BYTES = 1 << 20


@dataclass
class SlotsConfig:
    """How GPUs are cut into slots. The GPUs are those verl was given: trainer pool, rollout pool, reward pool."""

    gpus_per_slot: int = 0
    """GPUs that shift together. 0: the GPUs of the larger replica, policy's or judge's (tensor x pipeline x
    data parallel size)."""
    cpu_share: float = 0.5
    """CPU platform only: cores a slot may use, enforced by a cgroup quota (or one pinned core where not permitted)."""


@dataclass
class PlannerConfig:
    """When and how slots are moved."""

    name: str = "harmonic"
    """Decision rule: ``harmonic`` (published throughput rule), ``lookahead`` (predicts lengths and plays the coming
    minutes through under many allocations; its results are simulated ones, and it may think longer) or ``static``
    (slots keep their first role, training aside)."""
    interval_s: float = 1.0
    """Seconds between plans; a batch that is ready, a request that has to wait, and a slot or lease that changes
    trigger one at once."""
    window_s: float = 60.0
    """Horizon over which throughput gained is weighed against the cost of shifting."""
    margin: float = 0.05
    """A shift must gain at least this share of present throughput over the window, beyond its cost."""
    cooldown_s: float = 10.0
    """Seconds between two plans that shift by throughput (training, starving roles and slots that nobody uses are not
    held back)."""
    immunity_s: float = 10.0
    """Seconds a slot keeps a role it has just taken."""
    rollout_floor: int = 0
    """Slots that rollout never goes below while it has work."""
    genrm_floor: int = 0
    """Slots that genrm never goes below while it has work."""


@dataclass
class ShiftConfig:
    """Deadlines of the shift transaction; exceeding one rolls the slot back, or fails it."""

    drain_s: float = 60.0
    """Abort sequences and see the engine idle."""
    sleep_s: float = 60.0
    """Free weights and KV."""
    load_s: float = 300.0
    """Load weights from the parameter store."""
    wake_s: float = 120.0
    """Restore KV and open admission."""
    restart_failed: bool = True
    """Replace an engine whose process died, in the background; else the slot stays failed and is planned around."""
    restart_s: float = 300.0
    """Deadline for a replacement engine."""


@dataclass
class StoreConfig:
    """The parameter store: versioned weights in host memory, one copy a node."""

    directory: str = "/dev/shm/verl_pivot"
    """Absolute path of a folder on a tmpfs; each run makes its own folder inside."""
    keep_versions: int = 2
    """Published policy versions kept at least; older ones go when no reader holds them."""
    reserve_bytes: int = 256 * 1024 * 1024
    """Bytes that must stay free in the tmpfs after a publish."""
    shard_bytes: int = 2 * 1024 * 1024 * 1024
    """Largest size of one safetensors file."""


@dataclass
class JudgeConfig:
    """How requests to the generative reward model are handled."""

    queue_deadline_s: float = 600.0
    """A request waits this long for a judge to be awake before it fails with HTTP 503."""
    request_deadline_s: float = 600.0
    """One attempt at one judge engine."""


@dataclass
class TrainConfig:
    """How training takes part."""

    mini_batches_per_step: int = 1
    """Mini-batches that a step trains on as they become ready (verl's parameter_sync_step); weights are published
    once a step. ``data.train_batch_size`` must be this times ``actor.ppo_mini_batch_size`` when larger than 1."""
    poll_interval_s: float = 0.05
    """How often the trainer looks for finished groups."""
    lease_deadline_s: float = 600.0
    """The trainer gives up when its slots are not free after this long."""


@dataclass
class EngineConfig:
    """Inference engines."""

    host: str = "auto"
    """Where engine front ends live: ``per_replica`` (a Ray actor each, as verl does), ``shared`` (one actor a node;
    engine processes fork from one preloaded server) or ``auto`` (shared on the CPU platform, else per_replica)."""
    kv_cache_bytes: int = 67_108_864
    """CPU platform only: KV pool of each engine."""
    stats_interval_s: float = 0.25
    """How often engines report their load."""


@dataclass
class ObserveConfig:
    """What is written about a run."""

    directory: str = "outputs/resource_shift"
    """Events, report, trace and timeline of a run go to ``<directory>/<experiment_name>``."""
    timeline_png: bool = True
    """Draw the role timeline at the end of the run."""
    perfetto_trace: bool = True
    """Write a Perfetto trace at the end of the run."""


@dataclass
class ResourceShiftConfig:
    """Node ``trainer.resource_shift``."""

    enable: bool = False
    """The switch."""
    staleness: int = 0
    """Policy versions that rollout may run ahead of training; 0 is synchronous and on-policy."""
    slots: SlotsConfig = field(default_factory=SlotsConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    shift: ShiftConfig = field(default_factory=ShiftConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
