"""Leases: a version that is being read stays, and a dead reader holds nothing."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from store_cases import check_filled, filled, store_config, told
from store_processes import hold, read_for

from verl_pivot.store import ParameterStore, StoreBusy, StoreDeadline, VersionNotFound
from verl_pivot.store.locks import try_lock


def publish_range(store: ParameterStore, first: int, last: int) -> None:
    for version in range(first, last + 1):
        store.publish("policy", version, filled(version))


def test_reading_while_publishing_and_collecting(tmp_path: Path, children) -> None:
    with ParameterStore.create(store_config(tmp_path, keep_versions=1)) as store:
        store.publish("policy", 0, filled(0))
        pipes = [children.start_telling(read_for, store.run_dir, 0.8)[1] for _ in range(3)]
        version = 0
        while not all(pipe.poll(0) for pipe in pipes):
            version += 1
            store.publish("policy", version, filled(version))
        for seen in map(told, pipes):
            assert isinstance(seen, list), seen
            assert len(set(seen)) > 1
        store.collect()
        assert store.versions("policy") == [version]


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [5, 6]), (4, [3, 4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])])
def test_the_newest_versions_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    with ParameterStore.create(store_config(tmp_path, keep_versions=keep)) as store:
        publish_range(store, 1, 6)
        assert store.versions("policy") == left


def test_a_held_version_stays_until_it_is_let_go(store: ParameterStore) -> None:
    publish_range(store, 1, 1)
    first, second = store.open_version("policy"), store.open_version("policy", 1)
    publish_range(store, 2, 5)
    assert store.versions("policy") == [1, 4, 5]
    first.close()
    first.close()
    assert store.collect() == []
    check_filled(second)
    second.close()
    assert store.collect() == [("policy", 1)]
    assert store.versions("policy") == [4, 5]


def test_a_reader_that_is_dropped_holds_nothing(store: ParameterStore) -> None:
    publish_range(store, 1, 1)
    reader = store.open_version("policy")
    publish_range(store, 2, 3)
    assert store.collect() == []
    del reader
    assert store.collect() == [("policy", 1)]


def test_a_killed_reader_holds_nothing_even_if_it_had_children(store: ParameterStore, children) -> None:
    publish_range(store, 1, 1)
    holder, pipe = children.start_telling(hold, store.run_dir, 1)
    children.adopt(told(pipe))
    publish_range(store, 2, 4)
    assert store.versions("policy") == [1, 3, 4]
    holder.kill()
    holder.join()
    assert store.collect() == [("policy", 1)]


@pytest.mark.parametrize("version", [1, 7])
def test_a_version_that_is_not_there(store: ParameterStore, version: int) -> None:
    publish_range(store, 1, 4)
    with pytest.raises(VersionNotFound, match=rf"version {version} .* versions here are \[3, 4\].*keep_versions"):
        store.open_version("policy", version)
    with pytest.raises(VersionNotFound, match=r"'jugde' has no published version.*\['policy'\]"):
        store.open_version("jugde")


def test_nobody_can_open_a_version_that_is_about_to_be_removed(
    store: ParameterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_range(store, 1, 1)
    with store.open_version("policy"):
        publish_range(store, 2, 3)
    refused = []

    def rename(source: Path, target: Path) -> None:
        with pytest.raises(VersionNotFound):
            store.open_version("policy", 1)
        refused.append(source.name)
        real(source, target)

    real = os.rename
    monkeypatch.setattr(os, "rename", rename)
    assert store.collect() == [("policy", 1)]
    assert refused == ["v1"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_goes_while_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    path = tmp_path / "v1"
    path.mkdir()

    def too_late(fd: int, operation: int) -> None:
        if path.exists() and operation & fcntl.LOCK_SH:
            path.rename(tmp_path / ".removed")
            if replaced:
                path.mkdir()
        real(fd, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(FileNotFoundError):
        try_lock(path, shared=True)


def test_waiting_for_a_version(store: ParameterStore) -> None:
    publisher = threading.Timer(0.1, publish_range, (store, 1, 2))
    publisher.start()
    assert store.wait_for("policy", 1, 30.0) in (1, 2)
    assert store.wait_for("policy", 2, 30.0) == 2
    publisher.join()
    begin_s = time.monotonic()
    with pytest.raises(StoreDeadline, match=r"version 3 .* \(now: 2\)"):
        store.wait_for("policy", 3, 0.05)
    assert 0.05 <= time.monotonic() - begin_s < 5


def test_a_second_publisher_of_a_model_is_refused(store: ParameterStore) -> None:
    def published_between():
        yield from filled(1)
        with pytest.raises(StoreBusy, match="'policy'"):
            ParameterStore.attach(store.run_dir).publish("policy", 2, filled(2))
        store.publish("judge", 0, filled(0))

    store.publish("policy", 1, published_between())
    assert (store.versions("policy"), store.versions("judge")) == ([1], [0])
