"""What any verl run on a CPU needs, and nothing of the trainer mode; for VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

import verl_pivot.verl_ext.platform_cpu  # noqa: F401
from verl_pivot.import_hooks import on_import
from verl_pivot.verl_ext import cpu_patches as verl_cpu_patches
from verl_pivot.verl_ext import fsdp_cpu
from verl_pivot.vllm_ext import cpu_patches as vllm_cpu_patches
from verl_pivot.vllm_ext import distribution

on_import("verl.workers.engine", fsdp_cpu.register)
distribution.install()
vllm_cpu_patches.install()
verl_cpu_patches.install()
