"""verl's vLLM HTTP server with what a shift needs: drain, sleep, load a version, wake, report load.

Runs in the process that owns the engine's front end: its own Ray actor (GPU), or the node's engine host (CPU).
Subclasses verl/workers/rollout/vllm_rollout/vllm_async_server.py:87; overrides its documented hook methods.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from verl.utils.device import get_device_name
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_pivot.verl_ext import processes
from verl_pivot.verl_ext.sequences import ABORTED, SequenceBook, tokens_generated
from verl_pivot.vllm_ext.sampling import for_token_ids

logger = logging.getLogger(__name__)

FIRST_TOKEN_WAIT_S = 0.02


class ShiftHttpServer(vLLMHttpServer):
    """One engine that sleeps and wakes on command and never serves a version other than the one it reports.

    Args (beyond verl's):
        kv_cache_bytes: KV pool on the CPU platform.
    """

    def __init__(self, *args: Any, kv_cache_bytes: int = 0, **kwargs: Any) -> None:
        self._kv_cache_bytes = kv_cache_bytes
        super().__init__(*args, **kwargs)
        self._awake = False
        self._weights_resident = False
        self._half_awake = False
        self._served_version: int | None = None
        self._draining: asyncio.Task[dict[str, Any]] | None = None
        self._was_killed = False
        self._launch_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._tokens = 0
        self._arrived_s: dict[str, float] = {}
        self._first_tokens_s: list[float] = []
        self._last_report = (time.monotonic(), 0)
        self._sequences = SequenceBook()

    # ---- verl's hooks -------------------------------------------------------------------------------------------

    def _get_worker_extension_cls(self) -> str:
        return "verl_pivot.verl_ext.worker_extension.ShiftWorkerExtension"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if get_device_name() == "cpu":
            from verl_pivot.vllm_ext.engine_args import cpu_engine_kwargs

            for key, value in cpu_engine_kwargs(self._kv_cache_bytes).items():
                engine_kwargs.setdefault(key, value)

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """verl's launch; the engine then goes to sleep, so that the next one on this slot finds the memory free."""
        self._launch_arguments = (args, kwargs)
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            self._count_tokens()
            self._awake = True
            await self.drain()
            await self.sleep_engine()

    async def relaunch(self) -> tuple[str, int]:
        """Replace a dead engine by a new one, asleep. Returns its HTTP (address, port)."""
        self.shutdown_engine()
        self._served_version = None
        self._was_killed = self._half_awake = self._weights_resident = False
        args, kwargs = self._launch_arguments
        await self.launch_server(*args, **kwargs)
        return self.get_server_address()

    # ---- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        sequence: tuple[str, str, int, int] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """verl's generate; the version is fixed at admission, since a change of version aborts everything first.

        ``sequence``: the response that this is an attempt at (``core.sequences.SequenceState``).
        """
        version = self._served_version
        self._arrived_s[request_id] = time.monotonic()
        self._sequences.begin(request_id, sequence)
        try:
            output = await super().generate(prompt_ids, for_token_ids(sampling_params), request_id, **kwargs)
            self._sequences.end(request_id, len(output.token_ids), output.stop_reason not in ABORTED)
        finally:
            self._arrived_s.pop(request_id, None)
            self._sequences.lost(request_id)
        output.extra_fields["global_steps"] = version
        return output

    # ---- the shift's steps, called by the control plane ----------------------------------------------------------

    async def drain(self) -> int:
        """Close admission, abort everything, return when the engine has acknowledged being idle.

        verl's abort first waits until every request has a first token, up to a minute: those that wait for KV inside
        the engine are therefore aborted meanwhile.
        """
        self._drop_drain()
        self._draining = asyncio.ensure_future(self.abort_all_requests(reject_request=True))
        early = 0
        while not self._draining.done():
            await asyncio.wait({self._draining}, timeout=FIRST_TOKEN_WAIT_S)
            if not self._draining.done() and self._admitting > 0:
                states = self.engine.output_processor.request_states.items()
                early += await _abort(self.engine, [(key, s) for key, s in states if not tokens_generated(s)])
        return early + int(self._draining.result()["aborted_count"])

    def _drop_drain(self) -> None:
        """A drain that was given up must not pause the engine after it was opened again."""
        if self._draining is not None and not self._draining.done():
            self._draining.cancel()

    async def shed(self, count: int) -> int:
        """Abort ``count`` requests with the fewest tokens: they cost least to begin again. The engine stays open."""
        states = self.engine.output_processor.request_states
        fewest_first = sorted(states.items(), key=lambda item: _tokens_held(item[1]))
        return await _abort(self.engine, fewest_first[:count])

    async def abort_leftovers(self) -> int:
        """Abort requests that reached the closed engine over HTTP after the drain."""
        return await _abort(self.engine, list(self.engine.output_processor.request_states.items()))

    async def sleep_engine(self) -> None:
        """Free weights and KV; the engine is idle and closed. Idempotent, also after a load or wake that failed.

        Raises RuntimeError for an engine on a GPU whose weights did not come back whole: what it holds is unknown,
        and vLLM, to which it is still asleep, would free nothing. Only its end does.
        """
        if self._half_awake:
            raise RuntimeError("getting memory for the weights failed half way; the engine cannot sleep, only end")
        if self._awake:
            await self.engine.sleep(level=2)
        elif get_device_name() == "cpu":
            await self.engine.collective_rpc("sleep", kwargs={"level": 2})
        elif self._weights_resident:
            # vLLM cannot drop one tag: complete the wake, then sleep.
            await self.engine.wake_up(tags=["kv_cache"])
            await self.engine.sleep(level=2)
        self._weights_resident = False
        self._awake = False
        self._served_version = None

    async def load_weights(self, path: str, version: int) -> int:
        """Load the version directory ``path`` and return the version every worker reports.

        Works asleep (weights come back, KV stays away until ``wake_engine``) and awake but drained.
        """
        if not self._awake and not self._weights_resident and get_device_name() != "cpu":
            self._half_awake = True
            await self.engine.wake_up(tags=["weights"])
            self._half_awake = False
        self._weights_resident = True
        self._served_version = None  # a load that fails half way leaves weights of no version
        reported = await self.engine.collective_rpc("pivot_load_version", args=(path, version))
        if len(set(reported)) != 1:
            raise RuntimeError(f"workers of one engine report different versions: {sorted(set(reported))}")
        self._served_version = int(reported[0])
        self.global_steps = self._served_version
        return self._served_version

    async def wake_engine(self) -> None:
        """Restore KV, drop every cache, open admission. Weights must have been loaded."""
        if self._served_version is None:
            raise RuntimeError("wake without weights: load a version first")
        self._drop_drain()
        if not self._awake:
            if get_device_name() == "cpu":
                await self.engine.wake_up()
            else:
                await self.engine.wake_up(tags=["kv_cache"])
            self._awake = True
        await self.engine.reset_prefix_cache(reset_connector=True)
        await self.resume_generation()
        self._last_report = (time.monotonic(), self._tokens)

    def engine_pids(self) -> list[int]:
        """Processes that compute for this engine."""
        manager = self.engine.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes]

    async def kill_engine(self) -> None:
        """End the engine processes and what they started (a worker for each GPU holds the weights), and return when
        they are gone; ``relaunch`` brings new ones. Raises RuntimeError when one stays."""
        self._was_killed = True
        await processes.end(processes.family_of(self.engine_pids()))

    def shutdown_engine(self) -> None:
        """End the engine process and its HTTP server; the object is of no use afterwards."""
        task = getattr(self, "_server_task", None)
        if task is not None:
            task.cancel()
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.shutdown(timeout=0.5)

    # ---- load ---------------------------------------------------------------------------------------------------

    def is_dead(self) -> bool:
        """Whether the engine process is gone."""
        return self._was_killed or bool(self.engine.errored)

    async def load_report(self, with_sequences: bool = False) -> dict[str, Any]:
        """Load since the last call; ``dead`` when the engine process is gone.

        Answers when the engine's own process does: one that hangs is silent, although its front end is not.
        ``with_sequences``: also each sequence, see ``sequence_report``.
        """
        if self.is_dead():
            return {"dead": True}
        await self.engine.is_paused()
        states = list(self.engine.output_processor.request_states.values())
        context_tokens = sum(_tokens_held(state) for state in states)
        now_s = time.monotonic()
        last_s, last_tokens = self._last_report
        self._last_report = (now_s, self._tokens)
        running = min(len(states), self.config.max_num_seqs)
        interval_s = max(now_s - last_s, 1e-6)
        return {
            "dead": False,
            "running": running,
            "waiting": len(states) - running,
            "context_tokens": context_tokens,
            "tokens_per_s": (self._tokens - last_tokens) / interval_s,
            "first_token_s": self._take_first_token_s(),
            "kv_tokens": self._kv_tokens(),
            **(self.sequence_report() if with_sequences else {}),
        }

    def sequence_report(self) -> dict[str, Any]:
        """Sequences inside (``sequences``) and what ended since the last report (``ended``), as plain tuples."""
        return self._sequences.report(self.engine.output_processor.request_states)

    def _kv_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 where vLLM does not say."""
        cache = self.engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * (cache.block_size or 0))

    def _note_first_token(self, engine_request_id: str) -> None:
        # vLLM's own id of a request is the caller's with a suffix.
        arrived_s = self._arrived_s.pop(engine_request_id.rsplit("-", 1)[0], None)
        if arrived_s is not None:
            self._first_tokens_s.append(time.monotonic() - arrived_s)

    def _take_first_token_s(self) -> float:
        waited, self._first_tokens_s = self._first_tokens_s, []
        return sum(waited) / len(waited) if waited else 0.0

    def _count_tokens(self) -> None:
        """Count generated tokens at the one place that every front end (tokens, chat) passes.

        Wraps OutputProcessor.process_outputs on this instance (vllm/v1/engine/output_processor.py): the server runs
        with log_stats off, where vLLM counts nothing. Remove when vLLM reports tokens without stat loggers.
        """
        processor = self.engine.output_processor
        process_outputs = processor.process_outputs

        def counting(engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            for output in engine_core_outputs:
                self._tokens += len(output.new_token_ids)
                if self._arrived_s:  # someone waits for a first token; most steps have no one
                    self._note_first_token(output.request_id)
                if output.finish_reason is not None:
                    state = processor.request_states.get(output.request_id)
                    tokens = len(output.new_token_ids)
                    self._sequences.on_finished(output.request_id, state, tokens, output.finish_reason)
            return process_outputs(engine_core_outputs, *args, **kwargs)

        processor.process_outputs = counting


async def _abort(engine: Any, requests: list[tuple[str, Any]]) -> int:
    """Abort these (vLLM's own id, request state), by the ids that their callers gave; returns how many."""
    external_ids = [getattr(state, "external_req_id", None) or own_id for own_id, state in requests]
    if external_ids:
        await engine.abort(external_ids)
    return len(external_ids)


def _tokens_held(state: Any) -> int:
    """Prompt and generated tokens of one of vLLM's request states."""
    return (state.prompt_len or 0) + tokens_generated(state)
