"""The face of the parameter store."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from verl_pivot.config.schema import MIN_SHARD_BYTES, StoreConfig
from verl_pivot.store import collector, owner, reader, writer
from verl_pivot.store.layout import RunLayout
from verl_pivot.store.locks import PathLock
from verl_pivot.store.manifest import Manifest
from verl_pivot.store.reader import VersionReader

if TYPE_CHECKING:
    import torch


class ParameterStore:
    """Versioned weights of the models of one run, in a tmpfs folder that processes of the run share.

    The trainer process makes it (``create``) and passes ``run_dir`` on; rank 0 of the actor and the control plane
    attach to it (``attach``). Engine processes read the files of a version that the control plane holds open. All
    methods may be called from any process, and block: call the long ones, ``publish``, ``import_model`` and
    ``wait_for``, from a thread in an asyncio program. Closing, or the end of the owner, removes the run folder.
    """

    def __init__(self, layout: RunLayout, config: StoreConfig, ownership: PathLock | None) -> None:
        self._layout = layout
        self._config = config
        self._ownership = ownership
        self._pid = os.getpid()

    @classmethod
    def create(cls, config: StoreConfig) -> ParameterStore:
        """Starts a run in ``config.directory`` and owns it; sweeps runs whose owner is gone.

        Raises ValueError for options that make no sense.
        """
        _check(config)
        layout, ownership = owner.create_run(config)
        store = cls(layout, config, ownership)
        atexit.register(store.close)
        return store

    @classmethod
    def attach(cls, run_dir: str | Path, config: StoreConfig | None = None) -> ParameterStore:
        """Joins a run from another process, with the owner's options unless ``config`` gives others.

        Raises StoreClosed when the run or its owner is gone.
        """
        if config is not None:
            _check(config)
        layout = RunLayout(Path(run_dir).absolute())
        owners = owner.read_config(layout)
        return cls(layout, config or owners, None)

    @property
    def run_dir(self) -> Path:
        """What other processes need to attach."""
        return self._layout.run_dir

    @property
    def run_id(self) -> str:
        """Name of the run folder; unique on the machine."""
        return self._layout.run_dir.name

    @property
    def is_owner(self) -> bool:
        return self._ownership is not None and self._pid == os.getpid()

    def publish(
        self,
        model: str,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        hf_dir: str | Path | None = None,
        expected_bytes: int | None = None,
    ) -> Manifest:
        """Makes ``tensors`` the served ``version`` of ``model``. Called by one process (rank 0 of the actor).

        ``tensors`` are full, Hugging Face named tensors of any shape, on any device; each is written before the next
        is asked for. ``hf_dir`` gives the config, tokenizer and other companions of the model; when None, those of the
        version before are taken over. ``expected_bytes``, when known, lets a lack of room show before any work.

        Afterwards old versions are collected. On any failure, a kill included, the version before is still served and
        nothing of the new one is ever seen. Raises StoreFull, VersionOrder when ``version`` is not greater than all
        before, StoreBusy when the model is being published elsewhere, StoreClosed, ValueError and TypeError for
        tensors that cannot be stored, and whatever ``tensors`` raises.
        """
        source = Path(hf_dir).resolve() if hf_dir is not None else None
        with self._layout.alive():
            return writer.publish(
                self._layout, self._config, model, version, tensors, hf_dir=source, expected_bytes=expected_bytes
            )

    def import_model(self, model: str, hf_dir: str | Path, deadline_s: float = 600.0) -> Manifest:
        """Copies a safetensors checkpoint on disk into the store as version 0, with its companions.

        For weights that do not change, such as the judge's. Called by the trainer process before it launches engines.
        Several processes may call it: the first one copies, others wait for it (at most ``deadline_s``) and get its
        result, or the newest version when the model has been published since. Raises StoreFull, StoreDeadline,
        StoreClosed, FileNotFoundError when ``hf_dir`` has no safetensors checkpoint, VersionOrder when the name is
        already taken by other weights.
        """
        with self._layout.alive():
            return writer.import_model(self._layout, self._config, model, Path(hf_dir), deadline_s)

    def open_version(self, model: str, version: int | None = None) -> VersionReader:
        """Opens a version (None: the newest) under a lease; use it in a ``with`` block. Called by the control plane,
        which gives ``path`` to the engines and keeps the lease while they load.

        Raises VersionNotFound when it was never published or has been collected, StoreClosed.
        """
        with self._layout.alive():
            return reader.open_version(self._layout, model, version)

    def wait_for(self, model: str, version: int, deadline_s: float) -> int:
        """Waits until ``version`` or a later one is published; returns the newest.

        Raises StoreDeadline, StoreClosed.
        """
        return reader.wait_for(self._layout, model, version, deadline_s)

    def current_version(self, model: str) -> int | None:
        """Newest published version; None before the first."""
        return reader.current_version(self._layout, model)

    def versions(self, model: str) -> list[int]:
        """Published versions that still exist, oldest first."""
        with self._layout.alive():
            return reader.list_versions(self._layout, model)

    def collect(self) -> list[tuple[str, int]]:
        """Removes versions beyond ``store.keep_versions`` that no reader holds; returns (model, version) of each.

        Every publish does this for its own model; between publishes it frees what readers have let go since.
        """
        with self._layout.alive():
            return [
                (model, version)
                for model in self._layout.models()
                for version in collector.collect_model(self._layout, model, self._config.keep_versions)
            ]

    def sweep(self) -> None:
        """Removes what killed publishers and collectors left. The next publish of the model does the same."""
        with self._layout.alive():
            for model in self._layout.models():
                collector.sweep_model(self._layout, model)

    def close(self) -> None:
        """Removes the run folder when this process owns it; else does nothing.

        Idempotent, takes no lock and may be called from a signal handler, also one that interrupts ``close`` itself.
        Tensors that readers have mapped stay valid.
        """
        ownership = self._ownership
        if ownership is not None and self._pid == os.getpid():
            owner.remove_run(self._layout)
            ownership.release()
            self._ownership = None
            atexit.unregister(self.close)

    def __enter__(self) -> ParameterStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check(config: StoreConfig) -> None:
    floors = {"keep_versions": 1, "reserve_bytes": 0, "shard_bytes": MIN_SHARD_BYTES}
    for option, floor in floors.items():
        value = getattr(config, option)
        if value < floor:
            raise ValueError(f"trainer.resource_shift.store.{option}={value} must be at least {floor}")
