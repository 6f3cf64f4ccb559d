"""The parameter store: versioned weights in host memory, one copy a node, as Hugging Face model directories.

One process owns a run (the trainer process), one publishes (rank 0 of the actor), one holds versions open for the
engines (the control plane), many read the files of such a version by their path (engine processes). They share
nothing but a tmpfs folder: every rule below is kept by atomic renames and by ``flock``, so it holds whichever of them
is killed, and when.

    a version is visible whole or not at all         ``current.json`` is replaced last (writer)
    a version that is being read stays               shared lock on its directory (reader, collector)
    one publisher at a time for each model           exclusive lock on the model's directory (writer)
    a run folder lives as long as its owner          exclusive lock on ``owner.json`` (owner)
"""

from verl_pivot.store.errors import (
    StoreBusy,
    StoreClosed,
    StoreCorrupt,
    StoreDeadline,
    StoreError,
    StoreFull,
    VersionNotFound,
    VersionOrder,
)
from verl_pivot.store.manifest import Manifest, ShardEntry, TensorEntry
from verl_pivot.store.owner import sweep_dead_runs
from verl_pivot.store.parameter_store import ParameterStore
from verl_pivot.store.reader import VersionReader

__all__ = [
    "Manifest",
    "ParameterStore",
    "ShardEntry",
    "StoreBusy",
    "StoreClosed",
    "StoreCorrupt",
    "StoreDeadline",
    "StoreError",
    "StoreFull",
    "TensorEntry",
    "VersionNotFound",
    "VersionOrder",
    "VersionReader",
    "sweep_dead_runs",
]
