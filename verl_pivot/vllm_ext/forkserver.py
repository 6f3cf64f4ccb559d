"""Fork vLLM engine cores from a server that has everything imported: half a second instead of ten, and shared pages.

Python's own forkserver does the forking; this module gives a forked engine what a spawned one would have had: the
environment, CPU affinity and thread count of its parent at that moment, its own random state, and death with its
parent. ``install`` is called in the front-end process (the one that makes ``AsyncLLM`` or ``LLM``) before engines are
made. Only CPU engines whose core process is the worker (``UniProcExecutor``) are forked; all others start as before.

Leans on ``multiprocessing.forkserver`` and ``popen_forkserver`` of CPython 3.10 to 3.13. Remove when vLLM takes a
multiprocessing context for its engine cores.
"""

from __future__ import annotations

import ctypes
import io
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import context, forkserver, parent_process, popen_forkserver, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import reduction, set_spawning_popen
from types import ModuleType
from typing import Any

from verl_pivot.import_hooks import on_import

logger = logging.getLogger(__name__)

_SEAL = "verl_pivot.vllm_ext.forkserver_seal"
PRELOAD = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "verl_pivot.vllm_ext.cpu_worker",
)
"""What an engine imports on its way to the first token."""

_READ_AT_LOAD = ("LD_", "GOMP_", "KMP_", "MKL_", "OMP_", "MALLOC_", "GLIBC_TUNABLES", "PYTHONHASHSEED")
"""Prefixes of variables that libraries read once, when the server loads them; OMP_NUM_THREADS is made up for."""

_PR_SET_PDEATHSIG = 1


class ForkServerError(RuntimeError):
    """An engine cannot be forked soundly; the message says why."""


class _EngineForkServer(forkserver.ForkServer):
    """A server of our own, so that other users of ``multiprocessing`` do not share its preloaded modules."""

    def __init__(self, preload: Sequence[str]) -> None:
        super().__init__()
        self.preload: tuple[str, ...] = ()
        self.environ: dict[str, str] | None = None
        self.add_preload(preload)

    def add_preload(self, modules: Sequence[str]) -> None:
        new = [name for name in modules if name not in self.preload]
        if new and self.environ is not None:
            raise ForkServerError(f"cannot preload {', '.join(new)}: the engine fork server is running already")
        self.preload += tuple(new)
        self.set_forkserver_preload([*self.preload, _SEAL])

    def ensure_running(self) -> None:
        """Start the server with the environment of this moment; later engines may not need another one.

        Starting waits for the first engine because vLLM sets LD_PRELOAD while it makes the engine's configuration
        (vllm/platforms/cpu.py:316), and a spawned engine would have it.
        """
        if self.environ is None:
            self.environ = dict(os.environ)
        changed = fixed_variables_changed(self.environ, os.environ)
        if changed:
            raise ForkServerError(
                f"{', '.join(changed)} changed since the engine fork server was started, which has its libraries "
                "loaded with the old value; set it before the first engine is made"
            )
        super().ensure_running()


def fixed_variables_changed(before: Any, now: Any) -> list[str]:
    """Names of the environment variables whose new value could not reach a forked engine."""
    return sorted(
        name
        for name in before.keys() | now.keys()
        if name.startswith(_READ_AT_LOAD) and name != "OMP_NUM_THREADS" and before.get(name) != now.get(name)
    )


_server = _EngineForkServer(PRELOAD)


def install(preload_extra: Sequence[str] = ()) -> None:
    """Fork the engine cores that this process makes from now on. Idempotent; imports nothing of vLLM.

    ``preload_extra``: further modules to import in the server, e.g. the one of the worker extension class. They must
    not start threads: an engine refuses to run when the server had more than one. Raises ForkServerError when the
    server runs already without them.
    """
    _server.add_preload(preload_extra)
    on_import("vllm.v1.engine.utils", _use_engine_context)


def _use_engine_context(module: ModuleType) -> None:
    """vllm/v1/engine/utils.py:139 makes engine core processes from ``get_mp_context()``."""
    upstream = module.get_mp_context
    module.get_mp_context = lambda: _EngineContext(upstream())


class _EngineContext:
    """A multiprocessing context that forks what can be forked, and is the upstream one in everything else."""

    def __init__(self, upstream: Any) -> None:
        self._upstream = upstream

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        make = _EngineProcess if _can_fork(kwargs.get("kwargs") or {}) else self._upstream.Process
        return make(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)


def _can_fork(engine_core_kwargs: dict[str, Any]) -> bool:
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor = engine_core_kwargs.get("executor_class")
    vllm_config = engine_core_kwargs.get("vllm_config")
    return (
        isinstance(executor, type)
        and issubclass(executor, UniProcExecutor)
        and current_platform.is_cpu()
        # NUMA binding works by replacing the executable of a spawned process.
        and not vllm_config.parallel_config.numa_bind
    )


class _EngineProcess(context.ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        return _EnginePopen(process)

    def __getstate__(self) -> dict[str, Any]:
        # The first entry is unpickled first: the environment is in place before any argument is imported.
        surroundings = _Surroundings(dict(os.environ), os.sched_getaffinity(0), _server.preload)
        return {"_surroundings": surroundings, **self.__dict__}

    def run(self) -> None:
        threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
        super().run()


class _EnginePopen(popen_forkserver.Popen):
    """CPython's, with our server, and without a second import of the front end's main script in every engine."""

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, write_end = _server.connect_to_new_process(self._fds)
        # The child sees the end of its parent as the end of this pipe.
        alive_end = os.dup(write_end)
        self.finalizer = util.Finalize(self, util.close_fds, (alive_end, self.sentinel))
        with open(write_end, "wb", closefd=True) as stream:
            stream.write(message.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Surroundings:
    """What a spawned engine inherits from its parent and a forked one would inherit from the server instead."""

    def __init__(self, environ: dict[str, str], affinity: set[int], preloaded: tuple[str, ...]) -> None:
        self._arguments = (environ, affinity, preloaded)

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter, self._arguments


def _enter(environ: dict[str, str], affinity: set[int], preloaded: tuple[str, ...]) -> None:
    """Runs first in a forked engine. Raises ForkServerError when the server was not fit to be forked."""
    seal = sys.modules.get(_SEAL)
    if seal is not None and seal.OTHER_THREADS:
        raise ForkServerError(
            f"the engine fork server had other threads after preloading ({', '.join(seal.OTHER_THREADS)}), so its "
            "forks would be unsound: take the module that starts them out of preload_extra"
        )
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the server is our parent in the kernel's eyes
    if seal is not None and os.getppid() != seal.SERVER_PID:  # and was gone before we said so
        os.kill(os.getpid(), signal.SIGKILL)
    missing = [name for name in preloaded if name not in sys.modules]
    if missing:
        logger.warning("the engine fork server could not import %s: engines start slowly", ", ".join(missing))
    os.environ.clear()
    os.environ.update(environ)
    os.sched_setaffinity(0, affinity)
    _set_thread_count(environ.get("OMP_NUM_THREADS"), len(affinity))
    _reseed()


def _set_thread_count(omp_num_threads: str | None, cores: int) -> None:
    """libgomp took its number from the server's environment and affinity when it was loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    threads = int(omp_num_threads.split(",")[0]) if omp_num_threads else cores
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _reseed() -> None:
    """The random states of a fresh process: torch's is a constant until vLLM seeds it, the others are arbitrary."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(torch.initial_seed())


def _die_with_parent() -> None:
    """Kill this engine when the front end is gone, however it went. The kernel's own signal watches the server only."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
