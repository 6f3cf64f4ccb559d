"""What we hand to verl and vLLM arrives, and does not clash with what is there; what we use of vLLM is there.

The tables hold for every supported vLLM, those with CPU in their name for the one release of the CPU wheel. They are
checked against vLLM's source, without importing it.
"""

from __future__ import annotations

import ast

import pytest
import tiny_models as tiny
from upstream_source import find, function, imported_from, names_in, parameters, text_of, tree

from verl_pivot.vllm_ext import distribution
from verl_pivot.vllm_ext.engine_args import SLEEPING_CPU_WORKER, UNIPROC_EXECUTOR, cpu_engine_kwargs
from verl_pivot.vllm_ext.versions import CPU_DISTRIBUTION, SUPPORTED, installed_version
from verl_pivot.vllm_ext.worker_extension import VersionedWeights

CALLS = [
    ("transformers_utils/config.py", "get_config", "model trust_remote_code revision"),
    ("v1/engine/async_llm.py", "AsyncLLM.abort", "request_id"),
    ("v1/engine/async_llm.py", "AsyncLLM.sleep", "level"),
    ("v1/engine/async_llm.py", "AsyncLLM.wake_up", "tags"),
    ("v1/engine/async_llm.py", "AsyncLLM.collective_rpc", "method args kwargs"),
    ("v1/engine/async_llm.py", "AsyncLLM.reset_prefix_cache", "reset_connector"),
    ("v1/engine/async_llm.py", "AsyncLLM.shutdown", "timeout"),
    ("v1/engine/output_processor.py", "OutputProcessor.process_outputs", "engine_core_outputs"),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights", "weights_path"),
]
"""File below ``vllm/``, function, parameters that we pass, in this order."""

CLASSES = [
    ("config/cache.py", "CacheConfig", "block_size num_gpu_blocks"),
    ("v1/engine/__init__.py", "EngineCoreOutput", "request_id new_token_ids finish_reason"),
    ("v1/engine/async_llm.py", "AsyncLLM", "engine_core output_processor errored vllm_config"),
    ("v1/engine/core_client.py", "BackgroundResources", "engine_manager"),
    ("v1/engine/core_client.py", "MPClient", "resources"),
    ("v1/engine/detokenizer.py", "IncrementalDetokenizer", "output_token_ids"),
    ("v1/engine/exceptions.py", "EngineDeadError", ""),
    ("v1/engine/output_processor.py", "OutputProcessor", "request_states"),
    ("v1/engine/output_processor.py", "RequestState", "prompt_len prompt_token_ids detokenizer"),
    ("v1/engine/utils.py", "CoreEngineProcManager", "processes"),
    ("v1/worker/gpu_worker.py", "Worker", "reload_weights"),
    ("v1/worker/worker_base.py", "WorkerBase", "vllm_config model_config load_config"),
]
"""File, class (or "" for the module itself), names that it must have."""

CPU_FUNCTIONS = [
    ("config/vllm.py", "set_current_vllm_config", "vllm_config check_compile prefix"),
    ("logger.py", "init_logger", "name"),
    ("model_executor/model_loader/__init__.py", "get_model_loader", "load_config"),
    ("model_executor/model_loader/base_loader.py", "BaseModelLoader.load_weights", "model model_config"),
    ("model_executor/model_loader/reload/layerwise.py", "get_layerwise_info", "layer"),
    ("model_executor/model_loader/reload/layerwise.py", "record_metadata_for_reloading", "model"),
    ("model_executor/model_loader/reload/meta.py", "materialize_meta_tensor", "meta_tensor"),
    ("model_executor/model_loader/reload/meta.py", "to_meta_tensor", "tensor"),
    ("model_executor/model_loader/reload/sanitize.py", "restore_layer_refs", "tensor layer"),
    ("model_executor/model_loader/utils.py", "process_weights_after_loading", "model model_config target_device"),
    ("utils/system_utils.py", "get_mp_context", ""),
    ("utils/torch_utils.py", "set_default_torch_dtype", "dtype"),
    (
        "v1/worker/cpu_worker.py",
        "CPUWorker.__init__",
        "vllm_config local_rank rank distributed_init_method is_driver_worker",
    ),
    ("v1/worker/cpu_worker.py", "CPUWorker.sleep", "level"),
    ("v1/worker/cpu_worker.py", "CPUWorker.wake_up", "tags"),
    ("v1/worker/gpu_worker.py", "Worker.load_model", "load_dummy_weights"),
]
"""File, function, all its parameters."""

CPU_CLASSES = [
    ("config/load.py", "LoadConfig", "load_format use_tqdm_on_load"),
    ("config/model.py", "ModelConfig", "model revision dtype quantization enforce_eager trust_remote_code"),
    ("config/parallel.py", "ParallelConfig", "tensor_parallel_size pipeline_parallel_size numa_bind"),
    ("config/vllm.py", "VllmConfig", "model_config parallel_config load_config lora_config speculative_config"),
    ("model_executor/model_loader/reload/types.py", "LayerReloadingInfo", "restore_metadata"),
    ("platforms/__init__.py", "", "current_platform"),
    ("platforms/interface.py", "Platform", "is_cpu"),
    ("v1/engine/output_processor.py", "RequestState", "external_req_id"),
    ("v1/engine/utils.py", "", "get_mp_context"),
    ("v1/executor/uniproc_executor.py", "UniProcExecutor", ""),
    ("v1/worker/cpu_worker.py", "CPUWorker", "model_runner"),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", "model kv_caches"),
]

CPU_FRAGMENTS = [
    ("v1/engine/__init__.py", "FinishReason.__str__", "FINISH_REASON_STRINGS[self.value]"),
    ("v1/engine/input_processor.py", "InputProcessor.assign_request_id", 'f"{request.external_req_id}-{random_uuid()'),
    ("v1/engine/utils.py", "CoreEngineProcManager.__init__", "context = get_mp_context()"),
    ("v1/engine/utils.py", "CoreEngineProcManager.__init__", '"executor_class": executor_class'),
    ("v1/engine/utils.py", "CoreEngineProcManager.__init__", '"vllm_config": vllm_config'),
    ("v1/worker/cpu_worker.py", "CPUWorker", "class CPUWorker(Worker):"),
]
"""File, function or class, a piece of its text that ours stands on."""

COMPILED_IN_THE_SAMPLER = [
    ("v1/sample/ops/logprobs.py", "batched_count_greater_than"),
    ("v1/sample/ops/topk_topp_sampler.py", "compiled_random_sample"),
]
"""What ``SleepingCPUWorker`` keeps from being compiled."""

on_the_cpu_release = pytest.mark.skipif(
    not SUPPORTED[CPU_DISTRIBUTION].contains(installed_version() or "0"), reason="about another vLLM"
)


@pytest.mark.contract
@pytest.mark.parametrize(("file", "name", "passed"), CALLS, ids=[name for _, name, _ in CALLS])
def test_calls_take_what_we_pass(file: str, name: str, passed: str) -> None:
    accepted = parameters(function(f"vllm/{file}", name))
    assert [parameter for parameter in accepted if parameter in passed.split()] == passed.split()


@pytest.mark.contract
@on_the_cpu_release
@pytest.mark.parametrize(("file", "name", "expected"), CPU_FUNCTIONS, ids=[name for _, name, _ in CPU_FUNCTIONS])
def test_function_takes_what_it_took(file: str, name: str, expected: str) -> None:
    assert parameters(function(f"vllm/{file}", name)) == expected.split()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [*CLASSES, *[pytest.param(*row, marks=on_the_cpu_release) for row in CPU_CLASSES]],
    ids=[name or file for file, name, _ in [*CLASSES, *CPU_CLASSES]],
)
def test_class_has_what_we_use(file: str, name: str, expected: str) -> None:
    module = tree(f"vllm/{file}")
    node = find(module, name) if name else module
    assert isinstance(node, ast.ClassDef | ast.Module), f"vllm/{file} no longer has {name}"
    assert set(expected.split()) - names_in(node) == set()


@pytest.mark.contract
@on_the_cpu_release
@pytest.mark.parametrize(("file", "name", "piece"), CPU_FRAGMENTS, ids=[name for _, name, _ in CPU_FRAGMENTS])
def test_function_does_what_we_stand_on(file: str, name: str, piece: str) -> None:
    assert piece in text_of(f"vllm/{file}", name)


@pytest.mark.contract
def test_errored_is_a_property() -> None:
    """A method of that name would be true for ever."""
    errored = function("vllm/v1/engine/async_llm.py", "AsyncLLM.errored")
    assert [ast.unparse(decorator) for decorator in errored.decorator_list] == ["property"]


@pytest.mark.contract
@on_the_cpu_release
@pytest.mark.parametrize(("file", "name"), COMPILED_IN_THE_SAMPLER)
def test_the_sampler_compiles_these(file: str, name: str) -> None:
    decorators = function(f"vllm/{file}", name).decorator_list
    assert any(ast.unparse(decorator).startswith("torch.compile(") for decorator in decorators)


@pytest.mark.contract
def test_every_import_from_vllm_has_an_entry() -> None:
    names = imported_from("vllm")
    entries = {name.split(".")[0] for _, name, _ in [*CALLS, *CLASSES, *CPU_FUNCTIONS, *CPU_CLASSES]}
    entries |= {name for _, owner, of_module in CPU_CLASSES if not owner for name in of_module.split()}
    assert len(names) > 10
    assert names - entries == set()


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
