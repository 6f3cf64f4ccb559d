"""A publisher killed at any moment leaves the version before served, and nothing that the next one does not remove."""

from __future__ import annotations

import random
import time

import pytest
from store_cases import WAIT_S, check_filled, filled, leftovers, told
from store_processes import publish_and_die, publish_forever, read_for

from verl_pivot.store import ParameterStore, VersionNotFound


def test_kill_9_at_random_moments(store: ParameterStore, children) -> None:
    store.publish("policy", 0, filled(0))
    _, reading = children.start_telling(read_for, store.run_dir, 1.5)
    moments = random.Random(0)
    torn = 0
    for _ in range(20):
        before = store.current_version("policy")
        publisher = children.start(publish_forever, store.run_dir, before + 1)
        store.wait_for("policy", before + 1, WAIT_S)
        time.sleep(moments.uniform(0, 0.03))
        publisher.kill()
        publisher.join()
        torn += bool(leftovers(store.run_dir))
        with store.open_version("policy") as reader:
            check_filled(reader)
            assert reader.version > before
    assert torn > 0, "no kill ever hit a publish: the test tests nothing"
    seen = told(reading)
    assert isinstance(seen, list), seen
    assert seen
    store.sweep()
    assert leftovers(store.run_dir) == []


@pytest.mark.parametrize(
    ("point", "served"),
    [
        ("second shard", 3),
        ("naming shards", 3),
        ("before the directory's rename", 3),
        ("before the pointer's replacement", 3),
        ("after the pointer's replacement", 4),
        ("while collecting", 4),
    ],
)
def test_kill_9_at_each_step(store: ParameterStore, children, point: str, served: int) -> None:
    for version in (1, 2, 3):
        store.publish("policy", version, filled(version))
    dead = children.start(publish_and_die, store.run_dir, point, 4)
    dead.join(WAIT_S)
    assert dead.exitcode == -9
    assert store.current_version("policy") == served
    assert max(store.versions("policy")) == served
    if served == 3:
        with pytest.raises(VersionNotFound):
            store.open_version("policy", 4)
    with store.open_version("policy") as reader:
        check_filled(reader)
    store.publish("policy", served + 1, filled(served + 1))
    assert store.versions("policy") == [served, served + 1]
    with store.open_version("policy") as reader:
        check_filled(reader)
    assert leftovers(store.run_dir) == []
    assert sorted(p.name for p in (store.run_dir / "policy").glob("v*")) == [f"v{served}", f"v{served + 1}"]


def test_sweep_leaves_a_living_publisher_alone(store: ParameterStore) -> None:
    def swept_between():
        for index, item in enumerate(filled(1)):
            if index == 3:
                store.sweep()
            yield item

    store.publish("policy", 1, swept_between())
    with store.open_version("policy") as reader:
        check_filled(reader)
