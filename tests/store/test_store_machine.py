"""Any order of publishing, reading, collecting, failing and dying keeps the store's promises."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from store_cases import check_filled, filled, leftovers, store_config

from verl_pivot.store import ParameterStore, VersionNotFound, VersionOrder, VersionReader


class StoreMachine(RuleBasedStateMachine):
    """Beside the real store runs the simplest model of it: a list of versions and a list of held ones."""

    readers: Bundle = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.published: list[int] = []
        self.present: list[int] = []
        self.held: list[VersionReader] = []

    @initialize(keep=st.integers(1, 3))
    def create(self, keep: int) -> None:
        self.keep = keep
        self.store = ParameterStore.create(store_config(self.directory, keep_versions=keep))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            assert list(self.directory.iterdir()) == []
        shutil.rmtree(self.directory)

    @rule(step=st.integers(1, 3))
    def publish(self, step: int) -> None:
        version = (self.published[-1] if self.published else -1) + step
        self.store.publish("policy", version, filled(version, tensors=2, elements=10))
        self.published.append(version)
        self.present.append(version)
        self._model_collects()

    @rule(back=st.integers(0, 2))
    def publish_an_old_version(self, back: int) -> None:
        if self.published:
            version = self.published[-1] - back
            with pytest.raises(VersionOrder):
                self.store.publish("policy", version, filled(version))

    @rule(tensors=st.integers(0, 2))
    def fail_to_publish(self, tensors: int) -> None:
        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            yield from filled(99, tensors=tensors, elements=10)
            raise RuntimeError("gather failed")

        with pytest.raises(RuntimeError, match="gather failed"):
            self.store.publish("policy", 1000, failing())
        self._model_collects()

    @rule(named=st.booleans())
    def die_while_publishing(self, named: bool) -> None:
        """Leaves what a killed publisher leaves, before or after its directory has its final name."""
        newest = self.published[-1] if self.published else -1
        folder = f"v{newest + 1}" if named else f".writing-v{newest + 1}-abc"
        path = self.store.run_dir / "policy" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "model-00001-of-00001.safetensors").write_bytes(b"torn")

    @rule(target=readers)
    def open_newest(self) -> VersionReader | None:
        if not self.published:
            with pytest.raises(VersionNotFound):
                self.store.open_version("policy")
            return None
        reader = self.store.open_version("policy")
        assert reader.version == self.published[-1]
        self.held.append(reader)
        return reader

    @rule(target=readers, data=st.data())
    def open_some(self, data: st.DataObject) -> VersionReader | None:
        version = data.draw(st.integers(0, (self.published[-1] if self.published else 0) + 2))
        if version not in self.present:
            with pytest.raises(VersionNotFound):
                self.store.open_version("policy", version)
            return None
        reader = self.store.open_version("policy", version)
        self.held.append(reader)
        return reader

    @rule(reader=consumes(readers))
    def close_reader(self, reader: VersionReader | None) -> None:
        if reader is not None:
            reader.close()
            self.held.remove(reader)

    @rule()
    def collect(self) -> None:
        before = list(self.present)
        self._model_collects()
        removed = [("policy", version) for version in before if version not in self.present]
        assert self.store.collect() == removed

    @rule()
    def sweep(self) -> None:
        self.store.sweep()
        assert leftovers(self.store.run_dir) == []

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.current_version("policy") == (self.published[-1] if self.published else None)
        assert self.store.versions("policy") == self.present
        for reader in self.held:
            check_filled(reader, tensors=2)

    def _model_collects(self) -> None:
        held = {reader.version for reader in self.held}
        self.present = [v for v in self.present if v in held or v in self.present[-self.keep :]]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, database=None)
