"""Shared by all tests: child processes may write bytecode and use one thread, and see no machine-wide state."""

from __future__ import annotations

import os

# Child processes that import torch, verl or vLLM take three times as long without bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
