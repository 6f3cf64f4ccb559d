"""Shared by all tests: child processes may write bytecode, use one thread, and can be interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Child processes that import torch, verl or vLLM take three times as long without bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with ctrl-C ignored, which child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def fork_engines() -> None:
    """Engines of this session are forked: half a second each instead of ten. They share one server, which must know
    before its first engine what to preload, so nothing else may install it."""
    from verl_pivot.vllm_ext import distribution, forkserver

    tests = Path(__file__).parent
    os.environ["PYTHONPATH"] = f"{tests / 'vllm_ext'}:{tests}:{os.environ.get('PYTHONPATH', '')}"
    distribution.install()
    forkserver.install(preload_extra=("engine_extensions",))
