"""One inference engine with continuous batching, between events instead of token by token.

All running sequences gain one token a step, and a step's latency is linear in the tokens they hold, so the time of
any number of steps is a quadratic: an engine is computed only when a sequence arrives, ends, or no longer fits.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import count

from verl_pivot.core.cost_book import RoleCosts
from verl_pivot.core.snapshot import ReplicaLoad


@dataclass(eq=False)
class SimSequence:
    """A request to an engine: prompt, and the tokens it will generate, which only the simulator knows."""

    key: int
    prompt_tokens: int
    total_tokens: int
    """Tokens it will have generated when it ends."""
    group: int = -1
    step: int = -1
    """Training step it belongs to."""
    generated_tokens: int = 0
    started: bool = False
    order: int = 0
    """Admission number in its engine; the youngest is preempted first."""
    end_step: int = 0

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    @property
    def remaining_tokens(self) -> int:
        return self.total_tokens - self.generated_tokens


@dataclass
class EngineCounts:
    """What an engine has done so far."""

    decode_s: float = 0.0
    paused_s: float = 0.0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    """Of the prefilled ones: those that had been computed before, elsewhere or before a preemption."""
    preemptions: int = 0


class SimEngine:
    """Decodes its sequences in virtual time. The owner calls ``advance`` before it looks or acts.

    ``next_event_s`` is when something will happen if nobody acts; at that time ``advance`` returns what ended.
    """

    def __init__(self, spec: RoleCosts, now_s: float) -> None:
        self.spec = spec
        self.counts = EngineCounts()
        self.waiting: deque[SimSequence] = deque()
        self._running: list[tuple[int, int, SimSequence]] = []
        """Heap by the engine step at which each ends."""
        self._steps = 0
        self._context_tokens = 0
        self._step_start_s = now_s
        self._order = count()
        self._new_tokens = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> int:
        return len(self._running) + len(self.waiting)

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of what runs."""
        return sum(sequence.prompt_tokens for _, _, sequence in self._running)

    def has_room(self) -> bool:
        """A further sequence would run at once."""
        return not self.waiting and self.running < self.spec.max_sequences and self._fits(1024)

    def submit(self, sequence: SimSequence, now_s: float) -> None:
        """Take a sequence; it joins the batch at the next step that has room. ``advance(now_s)`` comes first."""
        self.waiting.append(sequence)
        self._admit(now_s)

    def advance(self, now_s: float) -> list[SimSequence]:
        """Compute up to ``now_s``; returns the sequences that ended, in order."""
        ended: list[SimSequence] = []
        while self._running:
            steps, latency_s = self._next()
            done = self._steps_within(now_s - self._step_start_s + 1e-9, latency_s)
            self._run(min(done, steps), latency_s)
            if done < steps:
                break
            while self._running and self._running[0][0] <= self._steps:
                sequence = heapq.heappop(self._running)[2]
                sequence.generated_tokens = sequence.total_tokens
                self._context_tokens -= sequence.context_tokens
                ended.append(sequence)
            self._make_room()
            self._admit(self._step_start_s)
        if not self._running:
            self._step_start_s = max(self._step_start_s, now_s)
            self._admit(self._step_start_s)
        return ended

    def next_event_s(self) -> float:
        """When the next sequence ends or must leave the batch; infinite when nothing runs."""
        if not self._running:
            return math.inf
        steps, latency_s = self._next()
        return self._step_start_s + self._time_of(steps, latency_s)

    def pause(self, seconds: float, now_s: float) -> None:
        """Nothing is computed for ``seconds``."""
        self._step_start_s = max(self._step_start_s, now_s) + seconds
        self.counts.paused_s += seconds

    def recompute(self, now_s: float) -> None:
        """Forget the KV cache, because the weights have changed: every running sequence is prefilled again."""
        for _, _, sequence in self._running:
            self._sync(sequence)
        self._prefill(self._context_tokens, again=self._context_tokens, now_s=now_s)

    def evict(self, now_s: float, sequences: int | None = None) -> list[SimSequence]:
        """Take away all sequences, or ``sequences`` of them: those that wait, then the youngest. Of their prefill, what
        lies ahead of ``now_s`` is never done. ``advance(now_s)`` comes first."""
        wanted = self.sequences if sequences is None else min(sequences, self.sequences)
        taken: list[SimSequence] = []
        while self.waiting and len(taken) < wanted:
            taken.append(self.waiting.pop())
        if len(taken) < wanted:
            by_age = sorted(self._running, key=lambda entry: entry[2].order)
            kept = by_age[: len(by_age) - (wanted - len(taken))]
            for _, _, sequence in reversed(by_age[len(kept) :]):
                self._sync(sequence)
                self._context_tokens -= sequence.context_tokens
                self._skip_prefill(sequence.context_tokens * self.spec.prefill_s_per_token, now_s)
                taken.append(sequence)
            self._running = kept
            heapq.heapify(self._running)
        return taken

    def close(self, now_s: float) -> list[SimSequence]:
        """End the engine; returns all its sequences. What was booked ahead, prefill or a pause, is taken back."""
        ahead_s = max(0.0, self._step_start_s - now_s)
        paused_s = min(ahead_s, self.counts.paused_s)
        self.counts.paused_s -= paused_s
        self._step_start_s -= paused_s
        self._skip_prefill(math.inf, now_s)
        return self.evict(now_s)

    def _skip_prefill(self, most_s: float, now_s: float) -> None:
        """Prefill that was booked ahead, the latest of it up to ``most_s``, is not done after all."""
        skipped_s = min(most_s, self._step_start_s - now_s)
        if skipped_s <= 0 or not self.spec.prefill_s_per_token or not self.counts.prefill_tokens:
            return
        tokens = min(self.counts.prefill_tokens, int(skipped_s / self.spec.prefill_s_per_token))
        self.counts.recomputed_tokens -= self.counts.recomputed_tokens * tokens // self.counts.prefill_tokens
        self.counts.prefill_tokens -= tokens
        self._step_start_s -= skipped_s

    def inside(self) -> list[SimSequence]:
        """All sequences, tokens up to date."""
        for _, _, sequence in self._running:
            self._sync(sequence)
        return [sequence for _, _, sequence in self._running] + list(self.waiting)

    def load(self) -> ReplicaLoad:
        latency_s = self._latency_s(self._context_tokens) if self._running else 0.0
        rate = self.running / latency_s if latency_s else 0.0
        return ReplicaLoad(self.running, len(self.waiting), self._context_tokens, rate)

    def _sync(self, sequence: SimSequence) -> None:
        sequence.generated_tokens = sequence.total_tokens - (sequence.end_step - self._steps)

    def _latency_s(self, context_tokens: float) -> float:
        return self.spec.decode.step_latency_s(self.running, context_tokens)

    def _next(self) -> tuple[int, float]:
        """Steps until a sequence ends or the KV cache is full, and the latency of the first of them."""
        steps = self._running[0][0] - self._steps
        if self.running > 1:
            room = (self.spec.kv_tokens - self._context_tokens) // self.running
            steps = min(steps, max(1, room))
        return max(1, steps), self._latency_s(self._context_tokens)

    def _time_of(self, steps: int, latency_s: float) -> float:
        growth = self.spec.decode.attn_s_per_token * self.running
        return steps * latency_s + growth * steps * (steps - 1) / 2

    def _steps_within(self, seconds: float, latency_s: float) -> int:
        """Whole steps that end within ``seconds``."""
        if seconds < latency_s:
            return 0
        half = self.spec.decode.attn_s_per_token * self.running / 2
        if half < 1e-15:
            return int(seconds / latency_s)
        linear = latency_s - half
        return int((math.sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))

    def _run(self, steps: int, latency_s: float) -> None:
        spent_s = self._time_of(steps, latency_s)
        self._steps += steps
        self._step_start_s += spent_s
        self._context_tokens += steps * self.running
        self.counts.decode_s += spent_s
        self.counts.generated_tokens += steps * self.running

    def _fits(self, tokens: int) -> bool:
        return self._context_tokens + tokens + self.running + 1 <= self.spec.kv_tokens

    def _admit(self, now_s: float) -> None:
        while self.waiting and self.running < self.spec.max_sequences:
            sequence = self.waiting[0]
            if self.running and not self._fits(sequence.context_tokens):
                return
            self.waiting.popleft()
            again = sequence.context_tokens if sequence.started else 0
            sequence.started = True
            self._prefill(sequence.context_tokens, again, now_s)
            sequence.order = next(self._order)
            sequence.end_step = self._steps + sequence.remaining_tokens
            heapq.heappush(self._running, (sequence.end_step, sequence.order, sequence))
            self._context_tokens += sequence.context_tokens

    def _prefill(self, tokens: int, again: int, now_s: float) -> None:
        spent_s = tokens * self.spec.prefill_s_per_token
        self._step_start_s = max(self._step_start_s, now_s) if not self._running else self._step_start_s
        self._step_start_s += spent_s
        self.counts.prefill_tokens += tokens
        self.counts.recomputed_tokens += again

    def _make_room(self) -> None:
        """Preempt the youngest until a step fits."""
        while self.running > 1 and self._context_tokens + self.running > self.spec.kv_tokens:
            entry = max(self._running, key=lambda entry: entry[2].order)
            self._running.remove(entry)
            heapq.heapify(self._running)
            sequence = entry[2]
            self._sync(sequence)
            self._context_tokens -= sequence.context_tokens
            self.counts.preemptions += 1
            self.waiting.appendleft(sequence)
