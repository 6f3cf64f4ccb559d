from __future__ import annotations

import ast
import fcntl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_cases import MACHINE, found, put

from verl_pivot.config.files import RUN_LOCK, folder_in_use, folder_obstacle, module_names, named_files
from verl_pivot.config.machine import look_at_machine

FUNCTION, MANAGER = "reward.custom_reward_function", "reward.reward_manager"
REWARD = "def compute_score():\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory and home, with a reward file and a data file."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "broken.py").write_text("def compute_score(:\n")
    (tmp_path / "data.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def findings_in(changes: dict[str, Any], environ: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """(option, problem and way out) of what is found when the files that ``changes`` name are looked at."""
    plain: dict[str, Any] = {}
    for option, value in changes.items():
        put(plain, option, value)
    machine = replace(MACHINE, files=tuple(named_files(plain, environ or {})))
    findings = found("cpu", changes, machine)
    assert all(finding.severity == "error" for finding in findings)
    return [(finding.option, f"{finding.problem} -> {finding.way_out}") for finding in findings]


@pytest.mark.parametrize(
    ("changes", "option", "text"),
    [
        ({f"{FUNCTION}.path": "/nope/r.py"}, f"{FUNCTION}.path", "no such file"),
        ({f"{FUNCTION}.path": "nope.py"}, f"{FUNCTION}.path", "no such file"),
        ({f"{FUNCTION}.path": "file:///nope/r.py"}, f"{FUNCTION}.path", "no such file"),
        ({f"{FUNCTION}.path": "."}, f"{FUNCTION}.path", "no such file"),
        ({f"{FUNCTION}.path": "~/reward.py"}, f"{FUNCTION}.path", "verl does not expand ~"),
        ({f"{FUNCTION}.path": "broken.py"}, f"{FUNCTION}.path", "SyntaxError"),
        (
            {f"{FUNCTION}.path": "reward.py", f"{FUNCTION}.name": "score"},
            f"{FUNCTION}.name",
            "did you mean compute_score?",
        ),
        ({f"{MANAGER}.source": "importlib"}, f"{MANAGER}.module.path", f"{MANAGER}.source=register"),
        (
            {f"{MANAGER}.source": "importlib", f"{MANAGER}.module.path": "/nope/m.py"},
            f"{MANAGER}.module.path",
            "no such file",
        ),
        (
            {f"{MANAGER}.source": "importlib", f"{MANAGER}.module.path": "reward.py", f"{MANAGER}.name": "Mine"},
            f"{MANAGER}.name",
            "no class of this name",
        ),
        ({"data.train_files": "/nope/a.parquet"}, "data.train_files", "list of them"),
        ({"data.val_files": ["data.parquet", "~/b.parquet"]}, "data.val_files", "list of them"),
    ],
)
def test_missing_file_is_one_error(changes: dict[str, Any], option: str, text: str, folder: Path) -> None:
    ((found_option, message),) = findings_in(changes)
    assert found_option == option
    assert text in message


@pytest.mark.parametrize(
    ("changes", "environ"),
    [
        ({f"{FUNCTION}.path": "reward.py"}, {}),
        ({f"{FUNCTION}.path": "pkg://mine.reward"}, {}),
        ({f"{MANAGER}.source": "register", f"{MANAGER}.module.path": "/nope/m.py"}, {}),
        ({f"{MANAGER}.source": "importlib", f"{MANAGER}.module.path": "pkg://mine.manager"}, {}),
        ({"data.train_files": ["data.parquet", "~/data.parquet"], "data.val_files": "hdfs://there/b.parquet"}, {}),
        ({"data.train_files": "shards/*.parquet"}, {}),
        ({"data.train_files": "table_of_mine", "data.custom_cls.path": "pkg://mine.dataset"}, {}),
        # relative to a directory that is not this one
        ({f"{FUNCTION}.path": "elsewhere.py"}, {"RAY_ADDRESS": "head:6379"}),
        (
            {"data.train_files": "a.parquet", "ray_kwargs.ray_init.runtime_env.working_dir": "/there"},
            {},
        ),
    ],
)
def test_what_is_there_or_cannot_be_told_is_fine(
    changes: dict[str, Any], environ: dict[str, str], folder: Path
) -> None:
    assert findings_in(changes, environ) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("async def f(): pass\nclass C:\n    def method(self): pass\n", {"f", "C"}),
        ("def f():\n    def inner(): pass\n    local = 1\n", {"f"}),
        ("import a.b, c as d\nfrom x import y as z\n", {"a", "d", "z"}),
        ("f = g = make()\nh: int = 1\n(i, j) = k()\n", {"f", "g", "h", "i", "j"}),
        ("try:\n    from fast import f\nexcept ImportError:\n    def f(): pass\n", {"f"}),
        ("from x import *\n", None),
        ("globals()['f'] = 1\n", None),
        ("def __getattr__(name): pass\n", None),
        ("def make():\n    global f\n    f = 1\n", None),
    ],
)
def test_names_of_a_module(source: str, names: set[str] | None) -> None:
    assert module_names(ast.parse(source)) == names


def test_folder_that_can_be_made(tmp_path: Path) -> None:
    assert folder_obstacle(tmp_path / "a" / "b", "ext4") is None
    assert folder_obstacle(tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "filesystem", "obstacle"),
    [
        ("/proc/x", "proc", "/proc is on proc, where no folder can be made"),
        ("file/below", None, "is not a folder"),
        ("file", None, "is not a folder"),
        ("dangling/below", None, "is not a folder"),
    ],
)
def test_folder_that_cannot_be_made(path: str, filesystem: str | None, obstacle: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert obstacle in str(folder_obstacle(tmp_path / path, filesystem))


def test_folder_that_others_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert folder_obstacle(tmp_path / "x", "ext4") == f"{tmp_path} cannot be written to"


def test_folder_that_a_run_writes_to(tmp_path: Path) -> None:
    assert not folder_in_use(tmp_path / "not_yet")
    assert not folder_in_use(tmp_path)
    (tmp_path / RUN_LOCK).touch()
    assert not folder_in_use(tmp_path)
    with (tmp_path / RUN_LOCK).open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert folder_in_use(tmp_path)
        fcntl.flock(opened, fcntl.LOCK_SH)
        assert not folder_in_use(tmp_path), "another that only looks"
    with (tmp_path / RUN_LOCK).open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a look lets go of it
    assert [path.name for path in tmp_path.iterdir()] == [RUN_LOCK]


def test_machine_knows_the_folder_that_a_run_writes_to(tmp_path: Path) -> None:
    config = {"trainer": {"experiment_name": "mine", "resource_shift": {"observe": {"directory": str(tmp_path)}}}}
    (tmp_path / "mine").mkdir()
    assert look_at_machine(config).run_folder_in_use is None
    with (tmp_path / "mine" / RUN_LOCK).open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert look_at_machine(config).run_folder_in_use == tmp_path / "mine"
