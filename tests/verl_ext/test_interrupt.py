"""Ctrl-C in the driver, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from omegaconf import OmegaConf
from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.verl_ext.interrupt import explain_interrupts
config = OmegaConf.create({{"trainer": {{"experiment_name": "mine", "save_freq": {save_freq}}}}})
explain_interrupts(config, ResourceShiftConfig())
{end}
"""
CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("save_freq", "way_on"),
    [(5, "trainer.resume_mode=auto"), (-1, "no checkpoint to go on from (trainer.save_freq=-1)")],
)
def test_an_interrupted_driver_says_where_and_how_to_go_on(save_freq: int, way_on: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(save_freq=save_freq, end=CTRL_C)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "verl-pivot report outputs/resource_shift/mine" in ended.stderr and way_on in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == -signal.SIGINT


def test_other_errors_keep_their_traceback() -> None:
    command = [sys.executable, "-c", SCRIPT.format(save_freq=1, end="raise ValueError('mine')")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" in ended.stderr and "ValueError: mine" in ended.stderr and "verl-pivot" not in ended.stderr
    assert ended.returncode == 1
