"""A full tmpfs: said before or while writing, the version before still served, nothing left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from store_cases import MIB, check_filled, filled, leftovers, store_config

from verl_pivot.store import ParameterStore, StoreFull, capacity

LARGE = dict(tensors=6, elements=350_000)  # 8 MiB
SAYS = (
    r"version 2 of model 'policy' .*needs [\d.,]+ \w+ more, but [\d.,]+ \w+ are free.*version 1 is still served.*"
    r"store\.directory.*store\.keep_versions \(now 2"
)


def assert_unharmed(store: ParameterStore) -> None:
    assert store.versions("policy") == [1]
    assert leftovers(store.run_dir) == []
    with store.open_version("policy") as reader:
        check_filled(reader)
    store.publish("policy", 2, filled(2))
    with store.open_version("policy") as reader:
        check_filled(reader)
        assert reader.version == 2


@pytest.mark.parametrize("expected_bytes", [None, 9 * MIB])
def test_too_little_room_beyond_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_bytes: int | None
) -> None:
    with ParameterStore.create(store_config(tmp_path, reserve_bytes=10 * MIB)) as store:
        store.publish("policy", 1, filled(1))

        def free_bytes(_: Path) -> int:
            written = sum(file.stat().st_size for file in store.run_dir.glob("policy/.*/*"))
            return 15 * MIB - written

        monkeypatch.setattr(capacity, "free_bytes", free_bytes)
        taken = []
        tensors = ((name, taken.append(name) or tensor) for name, tensor in filled(2, **LARGE))
        with pytest.raises(StoreFull, match=SAYS) as raised:
            store.publish("policy", 2, tensors, expected_bytes=expected_bytes)
        assert raised.value.free_bytes < raised.value.needed_bytes
        assert raised.value.directory == str(store.run_dir)
        assert len(taken) == (0 if expected_bytes else 4)
        assert_unharmed(store)


@pytest.mark.parametrize("checked", [True, False])
def test_a_real_tmpfs_that_is_full(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    with ParameterStore.create(store_config(small_tmpfs)) as store:
        store.publish("policy", 1, filled(1))
        with monkeypatch.context() as patch:
            if not checked:  # as when another process takes the room between the check and the write
                patch.setattr(capacity.Room, "check", lambda *_: None)
            with pytest.raises(StoreFull, match=SAYS):
                store.publish("policy", 2, filled(2, **LARGE))
        assert_unharmed(store)


def test_a_first_version_that_does_not_fit(small_tmpfs: Path) -> None:
    with ParameterStore.create(store_config(small_tmpfs)) as store:
        with pytest.raises(StoreFull, match="no version has been published"):
            store.publish("policy", 0, filled(0, **LARGE))
        assert (store.current_version("policy"), leftovers(store.run_dir)) == (None, [])


def test_versions_let_go_meanwhile_make_room(small_tmpfs: Path) -> None:
    with ParameterStore.create(store_config(small_tmpfs, keep_versions=1)) as store:
        size = dict(tensors=3, elements=200_000)  # 2.4 MB and three headers: two versions fit, three do not
        store.publish("policy", 1, filled(1, **size))
        reader = store.open_version("policy")
        store.publish("policy", 2, filled(2, **size))
        with pytest.raises(StoreFull):
            store.publish("policy", 3, filled(3, **size))
        reader.close()
        store.publish("policy", 3, filled(3, **size))
        assert store.versions("policy") == [3]


@pytest.mark.parametrize(
    ("needed_bytes", "free_bytes", "says"),
    [
        (100, 0, "needs 100 bytes more, but 0 bytes are free beyond the reserve of 1.0 MiB"),
        (MIB // 2, 1280 * 1024, "needs 512.0 KiB more, but 256.0 KiB are free"),
        (3 * MIB // 2, MIB + 2, "needs 1.5 MiB more, but 2 bytes are free"),
        (2048 * MIB, 2 * MIB, "needs 2,048.0 MiB more, but 1.0 MiB are free"),
    ],
)
def test_sizes_are_told_in_a_unit_that_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed_bytes: int, free_bytes: int, says: str
) -> None:
    monkeypatch.setattr(capacity, "free_bytes", lambda _: free_bytes)
    room = capacity.Room(tmp_path, store_config(tmp_path, reserve_bytes=MIB), "version 2 of model 'policy'", 1)
    with pytest.raises(StoreFull, match=re.escape(says)) as raised:
        room.check(needed_bytes)
    assert raised.value.free_bytes == free_bytes - MIB
