"""What the controller knows of single sequences, and what it makes of them for a planner that predicts lengths.

Fed with what engines and the balancer tell; asked when a snapshot is made. Absent from runs whose planner does not
look at lengths: their engines are not asked for sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_pivot.core.forecast import REFRESH_S, Forecast, RoleForecast
from verl_pivot.core.ledger import SequenceLedger
from verl_pivot.core.lengths import LengthPredictor
from verl_pivot.core.sequences import SequenceReport, SequenceState
from verl_pivot.core.snapshot import INFERENCE_ROLES, ReplicaLoad, Role, Snapshot
from verl_pivot.runtime.snapshots import LoadMonitor

BEGINS_AGAIN = frozenset({Role.GENRM})
"""Roles whose requests lose what they have generated when they are cut off: a judgement is asked for anew."""
JUDGED_PROMPTS = 1024
"""Of which a history is kept: what a judge reads seldom comes again."""


@dataclass(frozen=True)
class LengthOptions:
    """What the run's options say of sequences, by inference role."""

    max_tokens: Mapping[Role, int]
    """Budget of one response, and of one judgement."""
    batch_limits: Mapping[Role, int]
    """Sequences that one slot runs at a time."""
    responses_per_prompt: int
    refresh_s: float = REFRESH_S


class LengthWatch:
    """Ledgers and forecast of both inference roles. A role without engines stays empty."""

    def __init__(self, options: LengthOptions) -> None:
        self._options = options
        self._kv_tokens: dict[Role, int] = {}
        self._begin()

    def _begin(self) -> None:
        options = self._options
        rollout = RoleForecast(LengthPredictor(options.max_tokens[Role.ROLLOUT]), options.responses_per_prompt)
        # What a judge reads is one response: no two requests have it in common, unless it is asked again.
        genrm = RoleForecast(LengthPredictor(options.max_tokens[Role.GENRM], max_prompts=JUDGED_PROMPTS), siblings=1)
        self.forecast = Forecast({Role.ROLLOUT: rollout, Role.GENRM: genrm}, options.refresh_s)
        self.ledgers = {
            role: SequenceLedger(role_forecast, goes_on=role not in BEGINS_AGAIN, max_tokens=options.max_tokens[role])
            for role, role_forecast in self.forecast.roles.items()
        }

    def take(
        self,
        reports: Mapping[Role, SequenceReport],
        queued: Mapping[Role, list[SequenceState]],
        version: int,
        now_s: float,
    ) -> None:
        """One round of what engines told, and of what waits before them."""
        for role, waiting in queued.items():
            ledger, report = self.ledgers[role], reports.get(role, SequenceReport())
            ledger.end(report.ended, version, now_s)
            ledger.observe(report.running, version, now_s)
            ledger.observe(waiting, version, now_s)
            ledger.give_up_unseen(now_s)

    def fill(self, snapshot: Snapshot, monitor: LoadMonitor) -> Snapshot:
        """``snapshot`` with all that it says of lengths; predicted anew when the last prediction is old."""
        if self.forecast.is_due(snapshot.now_s, {role: demand.total for role, demand in snapshot.demand.items()}):
            self._look(snapshot)
        return replace(
            snapshot,
            backlog=self.forecast.backlog,
            groups=self.forecast.groups,
            prefill_s_per_token=self._prefill_s_per_token(monitor.undelayed_first_token_s()),
            batch_limit={role: self._batch_limit(role, monitor.loads(role)) for role in INFERENCE_ROLES},
            begins_again=BEGINS_AGAIN,
        )

    def _look(self, snapshot: Snapshot) -> None:
        rollout, demand = self.ledgers[Role.ROLLOUT], snapshot.demand
        self.forecast.look(
            {role: ledger.observations() for role, ledger in self.ledgers.items()},
            # What was begun under a version may be trained on up to ``staleness`` versions later.
            lambda group: rollout.born(group) + snapshot.staleness <= snapshot.policy_version,
            snapshot.now_s,
            unseen={role: max(0, demand[role].total - len(self.ledgers[role])) for role in demand},
            groups_open=snapshot.train.groups_open,
        )

    def _batch_limit(self, role: Role, loads: list[ReplicaLoad]) -> float:
        """Sequences of present size that one slot runs at a time, as options and KV cache allow."""
        running = sum(load.running for load in loads)
        context_tokens = sum(load.context_tokens for load in loads)
        told = max((load.kv_tokens for load in loads), default=0)
        kv_tokens = self._kv_tokens[role] = told or self._kv_tokens.get(role, 0)
        limit = float(self._options.batch_limits[role])
        return max(1.0, min(limit, kv_tokens * running / context_tokens)) if kv_tokens and context_tokens else limit

    def _prefill_s_per_token(self, first_token_s: Mapping[Role, float]) -> dict[Role, float]:
        """From the time to the first token of a request that waited for nothing, by role."""
        prompt_tokens = {role: self.forecast.roles[role].prompt_tokens for role in first_token_s}
        return {role: s / prompt_tokens[role] for role, s in first_token_s.items() if prompt_tokens[role] > 0}

    # ---- beyond the run -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with. JSON with text keys."""
        return {str(role): forecast.state() for role, forecast in self.forecast.roles.items()}

    def load(self, state: Any) -> None:
        """Go on with ``state``, before anything was taken. Raises ValueError when it is no such state; nothing of it
        is used then."""
        try:
            for role, forecast in self.forecast.roles.items():
                forecast.load(state[str(role)])
                if not math.isfinite(forecast.longest_of_new(1)):
                    raise ValueError(f"{role}: it predicts no number")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._begin()
            raise ValueError(f"{type(error).__name__}: {error}") from error
