"""A CPU worker whose sleep really frees weights and KV, and which knows the version of the weights it serves.

Upstream's ``CPUWorker.sleep`` logs a warning and frees nothing (vllm/v1/worker/cpu_worker.py:192). Selected with
``worker_cls``; the methods are called by ``collective_rpc`` in the engine's process, between steps. Remove when vLLM's
CPU worker has a sleep mode backend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_config
from vllm.v1.worker.cpu_worker import CPUWorker

from verl_pivot.vllm_ext import checkpoint, cpu_patches, cpu_weights
from verl_pivot.vllm_ext.engine_args import require_supported

logger = init_logger(__name__)


class WeightsLost(RuntimeError):
    """An engine has no weights left: load a version before it gets a request."""


class SleepingCPUWorker(CPUWorker):
    """See the module. Weights and KV are each either resident or dropped.

    ``_weights_path`` is where the weights came from, None when they did not come from a directory (dummy weights or
    verl's own weight sync): those cannot be restored after a sleep.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        require_supported(vllm_config)
        cpu_patches.install()
        # In spite of enforce_eager vLLM compiles helpers of its sampler (vllm/v1/sample/ops/topk_topp_sampler.py:341,
        # vllm/v1/sample/ops/logprobs.py:10): half a minute at the first token, while engines wait for each other's
        # compiler lock.
        torch.compiler.set_stance("force_eager")
        super().__init__(vllm_config, *args, **kwargs)
        self._weights_resident = False
        self._weights_path: str | None = None
        self._weights_version: int | None = None
        self._restore_on_wake = False
        self._kv_resident = True

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._weights_resident = True
        self._weights_path = None if self.load_config.load_format == "dummy" else self.model_config.model
        self._watch_foreign_loads()

    def sleep(self, level: int = 1) -> None:
        """Free KV and weights. Idempotent.

        Level 1: ``wake_up`` reads the weights again from where they came from. Level 2: ``wake_up`` leaves that to the
        caller (``load_version`` before it, or a weight sync after it). Called by ``EngineCore.sleep``, which has
        paused the scheduler and reset the prefix cache; a caller that comes by ``collective_rpc`` must do both.

        Raises RuntimeError for level 1 when the weights came from nowhere that they could be read again.
        """
        if level == 1 and self._weights_resident and self._weights_path is None:
            raise RuntimeError(
                "sleep(level=1) would lose the weights: they came by weight sync (or are dummies), not from a "
                "directory; use sleep(level=2) and load weights afterwards"
            )
        if self._weights_resident:
            self._restore_on_wake = level == 1
            self._drop_weights()
        if self._kv_resident:
            self._drop_kv()
        cpu_weights.trim_heap()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Make weights and KV (``tags``: "weights", "kv_cache"; None for both) resident again. Idempotent.

        Weights loaded by ``load_version`` meanwhile are kept. When reading fails the engine stays asleep and the call
        can be repeated.
        """
        if (tags is None or "weights" in tags) and not self._weights_resident:
            if self._restore_on_wake:
                assert self._weights_path is not None
                self._read_weights(self._weights_path, self._weights_version)
            else:
                self._materialise_for_sync()
        if tags is None or "kv_cache" in tags:
            self._restore_kv()
        cpu_weights.trim_heap()

    def load_version(self, path: str, version: int) -> int:
        """Load the HF directory ``path`` as policy version ``version`` and return the version now served.

        Asleep: only the weights become resident; ``wake_up`` then restores the KV. Awake: the engine must be paused
        and idle, and its prefix cache reset by the caller, since KV of the old weights is not valid under the new.

        Raises CheckpointError for a directory that is not a complete checkpoint of this model; nothing has been
        touched then: an engine that was asleep still is, one that was awake still serves its old weights. When
        reading fails later (a damaged file), an engine that was asleep still is, and one that was awake goes back to
        the old version from its directory; WeightsLost says that this was not possible either.
        """
        checkpoint.require_complete(path)
        checkpoint.require_same_model(path, self._config_of(path), self._own_config)
        if self._weights_resident:
            self._replace_weights(path, version)
        else:
            self._read_weights(path, version)
        cpu_weights.trim_heap()
        logger.info("Serving version %d from %s", version, path)
        return version

    def served_version(self) -> int | None:
        """Version of the last ``load_version``; None before the first, after a weight sync, and without weights."""
        return self._weights_version if self._weights_resident else None

    def memory_report(self) -> dict[str, int]:
        """Bytes: resident set of this process, weights (without packed copies), and KV."""
        return {
            "rss_bytes": psutil.Process().memory_info().rss,
            "weight_bytes": cpu_weights.weight_bytes(self.model_runner.model),
            "kv_bytes": sum(storage.nbytes() for storage in self._kv_storages()) if self._kv_resident else 0,
        }

    @functools.cached_property
    def _own_config(self) -> dict[str, Any]:
        return self._config_of(self.model_config.model)

    def _config_of(self, path: str) -> dict[str, Any]:
        try:
            return get_config(path, self.model_config.trust_remote_code).to_dict()
        except (OSError, ValueError, KeyError) as error:
            raise checkpoint.CheckpointError(f"{path} has no readable model config: {error}") from error

    def _watch_foreign_loads(self) -> None:
        """Notice weights that come by another way than ``load_version``; they have neither path nor version."""
        model = self.model_runner.model
        load_weights = model.load_weights

        @functools.wraps(load_weights)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._weights_path = self._weights_version = None
            return load_weights(*args, **kwargs)

        model.load_weights = watched

    def _drop_weights(self) -> None:
        self._weights_resident = False
        cpu_weights.drop_weights(self.model_runner.model)

    def _read_weights(self, path: str, version: int | None) -> None:
        """From dropped to resident; dropped again when that fails."""
        before = self._weights_path, self._weights_version
        try:
            cpu_weights.materialise_weights(self.model_runner.model)
            cpu_weights.read_weights(self.model_runner.model, self.vllm_config, path)
        except BaseException:
            self._drop_weights()
            self._weights_path, self._weights_version = before
            cpu_weights.trim_heap()
            raise
        self._weights_path, self._weights_version = path, version
        self._weights_resident = True

    def _replace_weights(self, path: str, version: int) -> None:
        """The old weights go first: both together need not fit. So the way back is to read the old ones again."""
        old_path, old_version = self._weights_path, self._weights_version
        self._drop_weights()
        try:
            self._read_weights(path, version)
        except Exception as error:
            try:
                if old_path is None:
                    raise WeightsLost("the old weights did not come from a directory")
                self._read_weights(old_path, old_version)
            except Exception as also:
                raise WeightsLost(
                    f"{path} could not be read ({error}) and neither could the old weights ({also}); "
                    "load a version before this engine gets a request"
                ) from error
            logger.error("Could not load version %d; serving version %s from %s again", version, old_version, old_path)
            raise

    def _materialise_for_sync(self) -> None:
        cpu_weights.materialise_weights(self.model_runner.model)
        self._weights_path = self._weights_version = None
        self._weights_resident = True

    def _kv_storages(self) -> Iterator[torch.UntypedStorage]:
        """Each once; a layer's entry is a tensor, or a list of them for state-space layers."""
        seen = set()
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    yield storage

    def _drop_kv(self) -> None:
        """The memory goes, the address range stays: views remain valid objects, and waking costs nothing."""
        for storage in self._kv_storages():
            cpu_weights.give_back_pages(storage)
        self._kv_resident = False

    def _restore_kv(self) -> None:
        """Pages come back one by one as they are used, zeroed as at start: attention reads whole blocks, and NaN
        garbage would survive masking."""
        self._kv_resident = True
