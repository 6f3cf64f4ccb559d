"""What we hand to verl and vLLM arrives, and does not clash with what is there."""

from __future__ import annotations

import pytest
import tiny_models as tiny

from verl_pivot.vllm_ext import distribution
from verl_pivot.vllm_ext.engine_args import SLEEPING_CPU_WORKER, UNIPROC_EXECUTOR, cpu_engine_kwargs
from verl_pivot.vllm_ext.worker_extension import VersionedWeights


@pytest.mark.parametrize("size", [0, -1])
def test_a_kv_pool_has_a_size(size: int) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_bytes={size}"):
        cpu_engine_kwargs(size)


@pytest.mark.contract
def test_engine_arguments_survive_the_command_line_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of vllm_async_server.py launch_server and run_server, with the values that verl sets itself."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    distribution.install()
    import vllm.entrypoints.cli.serve as serve
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    args = {
        "dtype": "float32",
        "load_format": "dummy",
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
        "max_model_len": 256,
        "enable_sleep_mode": True,
        "enforce_eager": False,
        "compilation_config": '{"cudagraph_mode": "FULL_AND_PIECEWISE"}',
        **cpu_engine_kwargs(48 << 20),
    }
    parser = FlexibleArgumentParser()
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(subparsers)
    parsed = parser.parse_args(["serve", tiny.model_dir(tiny.DENSE), *build_cli_args_from_config(args)])
    parsed.model = parsed.model_tag
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()

    assert config.parallel_config.distributed_executor_backend == UNIPROC_EXECUTOR
    assert Executor.get_class(config) is UniProcExecutor
    assert config.parallel_config.worker_cls == SLEEPING_CPU_WORKER
    assert config.cache_config.kv_cache_memory_bytes == 48 << 20
    assert config.model_config.enforce_eager
    assert not config.model_config.enable_sleep_mode


@pytest.mark.contract
def test_the_extension_clashes_with_no_worker() -> None:
    """vllm/v1/worker/worker_base.py:272 asserts the same when it mixes the extension in."""
    distribution.install()
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm.v1.worker.gpu_worker import Worker

    from verl_pivot.vllm_ext.cpu_worker import SleepingCPUWorker

    names = {name for name in dir(VersionedWeights) if not name.startswith("__")}
    assert len(names) >= 4
    for other in (Worker, SleepingCPUWorker, vLLMColocateWorkerExtension):
        assert not [name for name in names if hasattr(other, name)]
    ours = {name for name in vars(SleepingCPUWorker) if not name.startswith("__")}
    assert not [name for name in ours if hasattr(vLLMColocateWorkerExtension, name)]
