"""Run folders: side by side, gone with their owner, and nothing else in the directory is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_cases import check_filled, filled, store_config, told
from store_processes import own

from verl_pivot.store import ParameterStore, StoreClosed, sweep_dead_runs

CREATE = """
import os, sys
from verl_pivot.config.schema import StoreConfig
from verl_pivot.store import ParameterStore
store = ParameterStore.create(StoreConfig(directory=sys.argv[1]))
print(store.run_dir, flush=True)
"""
SIGTERM_HANDLED = """
import signal
def end(*_):
    store.close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.kill(os.getpid(), signal.SIGTERM)
"""
LOSE_A_FORKED_CHILD = """
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(store.run_dir.exists(), flush=True)
"""


def run_python(script: str, directory: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script, str(directory)], capture_output=True, text=True)
    return done.stdout.splitlines()


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    one, two = (ParameterStore.create(store_config(tmp_path)) for _ in range(2))
    assert one.run_dir != two.run_dir
    one.publish("policy", 1, filled(1))
    two.publish("policy", 2, filled(2))
    with one.open_version("policy") as reader:
        check_filled(reader)
        assert reader.version == 1
    one.close()
    one.close()
    assert os.listdir(tmp_path) == [two.run_id]
    with two.open_version("policy") as reader:
        check_filled(reader)
    two.close()
    assert os.listdir(tmp_path) == []


def test_dead_runs_are_swept_and_living_ones_are_not(tmp_path: Path, children) -> None:
    owners = [children.start_telling(own, tmp_path) for _ in range(2)]
    (dead_dir, dead_child), (live_dir, live_child) = (told(pipe) for _, pipe in owners)
    children.adopt(dead_child)
    children.adopt(live_child)
    attached = ParameterStore.attach(dead_dir)
    attached.publish("policy", 1, filled(1))
    assert sweep_dead_runs(tmp_path) == []
    owners[0][0].kill()
    owners[0][0].join()
    with pytest.raises(StoreClosed, match="owner"):
        ParameterStore.attach(dead_dir)
    with ParameterStore.create(store_config(tmp_path)) as store:
        assert sorted(os.listdir(tmp_path)) == sorted([live_dir.name, store.run_id])
    with pytest.raises(StoreClosed, match="is gone"):
        attached.publish("policy", 2, filled(2))


def test_sweeping_touches_nothing_but_runs(tmp_path: Path) -> None:
    for name in ("precious", "run-of-mine", ".dead-precious", "run-20260101T000000-1-zzzzzzzz"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-20260101T000000-1-0123abcd").touch()
    before = sorted(os.listdir(tmp_path))
    half_made, half_removed = "run-20260101T000000-1-00000000", ".dead-run-20260101T000000-1-00000001"
    (tmp_path / half_made / "policy").mkdir(parents=True)
    (tmp_path / half_removed / "policy").mkdir(parents=True)
    assert sweep_dead_runs(tmp_path) == [half_made]
    assert sorted(os.listdir(tmp_path)) == before
    assert sweep_dead_runs(tmp_path / "missing") == []


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise RuntimeError", SIGTERM_HANDLED])
def test_a_run_ends_with_its_process(tmp_path: Path, ending: str) -> None:
    assert len(run_python(CREATE + ending, tmp_path)) == 1
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_end_the_run(tmp_path: Path) -> None:
    assert run_python(CREATE + LOSE_A_FORKED_CHILD, tmp_path)[1] == "True"


def test_everything_says_so_when_the_run_is_over(tmp_path: Path) -> None:
    store = ParameterStore.create(store_config(tmp_path))
    attached = ParameterStore.attach(store.run_dir)
    assert (store.is_owner, attached.is_owner) == (True, False)
    attached.close()
    store.publish("policy", 1, filled(1))
    held = attached.open_version("policy")
    tensors = dict(held.iter_tensors())
    store.close()
    for use in (
        lambda: attached.publish("policy", 2, filled(2)),
        lambda: attached.open_version("policy"),
        lambda: attached.current_version("policy"),
        lambda: attached.versions("policy"),
        lambda: attached.wait_for("policy", 2, 30.0),
        lambda: attached.import_model("judge", tmp_path),
        attached.collect,
        attached.sweep,
        lambda: ParameterStore.attach(store.run_dir),
    ):
        with pytest.raises(StoreClosed, match="gone"):
            use()
    assert all(tensor.eq(1).all() for tensor in tensors.values())
    assert not store.run_dir.exists()


def test_closing_during_a_publish_leaves_nothing(tmp_path: Path) -> None:
    store = ParameterStore.create(store_config(tmp_path))
    attached = ParameterStore.attach(store.run_dir)

    def closed_between():
        for index, item in enumerate(filled(1)):
            if index == 3:
                store.close()
            yield item

    with pytest.raises(StoreClosed, match="gone"):
        attached.publish("policy", 1, closed_between())
    assert os.listdir(tmp_path) == []


def test_a_directory_of_several_users_is_like_tmp(tmp_path: Path) -> None:
    with ParameterStore.create(store_config(tmp_path / "deep" / "store")) as store:
        assert (tmp_path / "deep" / "store").stat().st_mode & 0o7777 == 0o1777
        assert store.run_dir.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("option", ["keep_versions", "shard_bytes"])
def test_options_that_make_no_sense(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.resource_shift\.store\.{option}=0 must be at least"):
        ParameterStore.create(store_config(tmp_path, **{option: 0}))


def test_importing_the_store_is_light() -> None:
    heavy = run_python(
        "import sys, verl_pivot.store; print({'torch', 'verl', 'ray', 'vllm'} & set(sys.modules))", Path()
    )
    assert heavy == ["set()"]
