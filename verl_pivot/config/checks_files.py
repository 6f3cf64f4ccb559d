"""Checks of the files and folders that a configuration names: they would be missed only minutes into a run."""

from __future__ import annotations

import difflib
import os

from verl_pivot.config.files import DATA_FILES, REWARD_FUNCTION, REWARD_MANAGER, NamedFile
from verl_pivot.config.findings import Finding, error, warning
from verl_pivot.config.machine import EXPERIMENT_NAME, OBSERVE_DIRECTORY
from verl_pivot.config.subject import Subject

_OBJECT_OF = {
    f"{REWARD_FUNCTION}.path": (f"{REWARD_FUNCTION}.name", "function"),
    # verl loads the manager by this name, and not by module.name
    f"{REWARD_MANAGER}.module.path": (f"{REWARD_MANAGER}.name", "class"),
}
"""Option of a Python file -> option with the name that must be in it, and what that is."""


def data_files(subject: Subject) -> list[Finding]:
    """Local data files exist."""
    findings = []
    for file in subject.machine.files:
        if file.option in DATA_FILES and not file.exists:
            way_out = f"set {file.option} to a parquet or json file, or a list of them"
            findings.append(error(file.option, file.path, "there is no such file", way_out))
    return findings


def reward_code(subject: Subject) -> list[Finding]:
    """The files of reward function and reward manager exist and define what is asked of them."""
    findings = [finding for file in subject.machine.files for finding in _python(subject, file)]
    path = f"{REWARD_MANAGER}.module.path"
    if subject.get(f"{REWARD_MANAGER}.source") == "importlib" and not subject.get(path):
        problem = f"{REWARD_MANAGER}.source=importlib, but no file is named"
        findings.append(error(path, None, problem, f"set {path}, or {REWARD_MANAGER}.source=register"))
    return findings


def _python(subject: Subject, file: NamedFile) -> list[Finding]:
    if file.option not in _OBJECT_OF:
        return []
    name_option, kind = _OBJECT_OF[file.option]
    if not file.exists:
        problem = "there is no such file"
        if file.path.startswith("~"):
            way_out = f"write {os.path.expanduser(file.path)}: verl does not expand ~ here"
        else:
            way_out = f"set {file.option} to a Python file, best with its whole path, or to pkg://package.module"
        return [error(file.option, file.path, problem, way_out)]
    if file.broken is not None:
        return [error(file.option, file.path, f"cannot be read as Python: {file.broken}", "correct the file")]
    name = subject.get(name_option)
    if file.names is None or name in file.names:
        return []
    similar = difflib.get_close_matches(str(name), file.names, n=1, cutoff=0.4)
    hint = f"did you mean {similar[0]}? Else " if similar else ""
    way_out = f"{hint}set {name_option} to a {kind} that the file defines"
    return [error(name_option, name, f"{file.path} defines no {kind} of this name", way_out)]


def observe(subject: Subject) -> list[Finding]:
    """What is written about a run has a folder of its own, and the timeline can be drawn at its end."""
    findings = _run_folder(subject)
    option = "trainer.resource_shift.observe.timeline_png"
    if subject.get(option, True) and not subject.machine.can_draw:
        way_out = f"pip install matplotlib, or set {option}=false"
        findings.append(warning(option, True, "matplotlib is not installed", way_out))
    return findings


def _run_folder(subject: Subject) -> list[Finding]:
    name, machine = subject.get(EXPERIMENT_NAME), subject.machine
    if name is None or not _is_below(str(name)):
        problem = f"must be the name of a folder inside {OBSERVE_DIRECTORY}: what is written about the run goes there"
        return [error(EXPERIMENT_NAME, name, problem, f"name the run, such as {EXPERIMENT_NAME}=my_run")]
    if machine.observe_obstacle is not None:
        problem = f"cannot be made: {machine.observe_obstacle}"
        way_out = f"set {OBSERVE_DIRECTORY} to a folder that can be written to, such as outputs/resource_shift"
        return [error(OBSERVE_DIRECTORY, subject.get(OBSERVE_DIRECTORY), problem, way_out)]
    if machine.run_folder_in_use is not None:
        problem = f"another run is writing to {machine.run_folder_in_use}"
        way_out = f"give this one another {EXPERIMENT_NAME}, or another {OBSERVE_DIRECTORY}"
        return [error(EXPERIMENT_NAME, name, problem, way_out)]
    return []


def _is_below(path: str) -> bool:
    """Whether a path that is put behind a folder leads to another one inside of it."""
    normal = os.path.normpath(path)
    return not os.path.isabs(normal) and normal.split(os.sep)[0] not in (os.curdir, os.pardir)
