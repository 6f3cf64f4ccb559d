"""The events of a run: one TypedDict per kind, which is also the format of one line of the event log.

Written by the control plane (``events.jsonl``) and the trainer (``trainer.jsonl``); read by everything else in
``observe``. Times are seconds since the start of the run (``t_s``, ``t_start_s``), durations are seconds. Keys of a
``total=False`` class may be missing; all others must be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

ROLES = ("rollout", "genrm", "train")
"""The values of ``core.snapshot.Role``, in the order in which tables and legends show them."""
INFERENCE_ROLES = ("rollout", "genrm")
SHIFTING = "shifting"
FAILED = "failed"
STATES = (*ROLES, SHIFTING, FAILED)
"""All a slot can be; at any instant it is exactly one of them."""
PHASES = ("drain_s", "sleep_s", "load_s", "wake_s")
"""The parts of a shift, in the order in which they happen."""

ShiftEnd = Literal["done", "rolled_back", "failed", "cancelled"]
"""``cancelled``: the run ended while the shift was going on."""
RunOutcome = Literal["finished", "failed", "interrupted"]


class SlotInfo(TypedDict):
    """One slot as the run began."""

    slot: int
    role: str
    can_host: list[str]


class _SlotLoadDetail(TypedDict, total=False):
    context_tokens: int
    """Tokens (prompt and generated) of all running sequences."""
    first_token_s: float
    """Mean seconds to the first token of the requests that got one since the last report; 0 when none did."""


class SlotLoad(_SlotLoadDetail):
    """Load of one slot's engines in one sample."""

    role: str
    status: str
    running: int
    waiting: int
    tokens_per_s: float


class _Stamped(TypedDict):
    t_s: float


class _LogStart(TypedDict, total=False):
    wall_time: str
    """ISO time; on the first line that a process writes."""
    t0_unix_s: float
    """Unix time at which the run's ``t_s`` is 0; on the first line that a process writes."""


class RunStart(_Stamped, _LogStart):
    kind: Literal["run_start"]
    run_id: str
    slots: list[SlotInfo]
    config: dict[str, Any]


class _ShiftDetail(TypedDict, total=False):
    drain_s: float
    sleep_s: float
    load_s: float
    wake_s: float
    restart_s: float
    """Only where an engine was restarted."""
    kill_s: float
    """Only where an engine was ended."""
    aborted: int
    """Sequences that had to move."""
    reason: str
    gain: float
    cost: float
    error: str | None


class ShiftEvent(_Stamped, _ShiftDetail):
    """Emitted when the shift is over, whatever its outcome."""

    kind: Literal["shift"]
    slot: int
    source: str
    target: str
    t_start_s: float
    duration_s: float
    outcome: ShiftEnd


class _PlanDetail(TypedDict, total=False):
    took_s: float
    """To look and to decide."""


class PlanEvent(_Stamped, _PlanDetail):
    """Emitted when the class of the reason (``reason_class``) changes, and for every plan with shifts."""

    kind: Literal["plan"]
    reason: str
    shifts: int


class LeaseEvent(_Stamped):
    kind: Literal["lease"]
    state: Literal["wanted", "held", "free"]


class LoadEvent(_Stamped):
    """A sample of all slots (keyed by the slot id as text) and of what waits outside the engines, by role."""

    kind: Literal["load"]
    slots: dict[str, SlotLoad]
    queued: dict[str, int]


class SequencesEvent(_Stamped):
    """How many sequences of a role the controller's books have seen, where lengths are predicted; at the end of a run.
    ``begun = whole + cut_off + open``."""

    kind: Literal["sequences"]
    role: str
    begun: int
    whole: int
    cut_off: int
    """For good: given up by their clients, or begun again as others."""
    open: int


class PublishEvent(_Stamped):
    kind: Literal["publish"]
    version: int
    duration_s: float
    bytes: int


class ServedEvent(_Stamped):
    """An engine says which policy version it serves."""

    kind: Literal["served"]
    slot: int
    role: str
    version: int


class EngineEvent(_Stamped):
    """Processes that compute for the engines of a role on a slot, after a launch (CPU platform)."""

    kind: Literal["engine"]
    slot: int
    role: str
    pids: list[int]


class EvenedEvent(_Stamped):
    """A slot gave up sequences to others of its role that had fewer."""

    kind: Literal["evened"]
    slot: int
    role: str
    moved: int


class _FailureDetail(TypedDict, total=False):
    role: str | None
    error: str


class SlotFailedEvent(_Stamped, _FailureDetail):
    kind: Literal["slot_failed"]
    slot: int


class SlotRecoveredEvent(_Stamped):
    kind: Literal["slot_recovered"]
    slot: int
    role: str


class SpanEvent(_Stamped):
    """A stretch of work of the trainer; spans may nest."""

    kind: Literal["span"]
    role: str
    name: str
    t_start_s: float
    duration_s: float


class _StepDetail(TypedDict, total=False):
    response_tokens: int
    reward_mean: float | None
    accuracy: float | None
    """Share of responses that are truly right, whatever the judge says."""
    judge_agreement: float | None
    probs_diff_max: float | None
    """Largest difference between a token's probability under the rollout engine and under the trainer."""
    policy_version: int
    timing: dict[str, float]
    """Seconds of the parts of the step, by the trainer's names for them."""


class StepEvent(_Stamped, _StepDetail):
    """Emitted when a training step ends; the counts are those of this step."""

    kind: Literal["step"]
    step: int
    wall_s: float
    prompts: int
    responses: int
    rewards: int


class _RunEndDetail(TypedDict, total=False):
    submitted: int
    """Prompts that went out; ``submitted = prompts + dropped + in_flight + lost``."""
    dropped: int
    """Prompts that failed or grew too old, and were replaced."""
    in_flight: int | None
    """Prompts that the end of the run caught on their way; None when the queue that held them is gone."""


class RunEnd(_Stamped, _RunEndDetail):
    """The counts are those of the whole run."""

    kind: Literal["run_end"]
    outcome: RunOutcome
    lost: int | None
    """Prompts that nobody can account for; None when ``in_flight`` is."""
    prompts: int
    responses: int
    rewards: int


Event = (
    RunStart
    | ShiftEvent
    | PlanEvent
    | LeaseEvent
    | LoadEvent
    | SequencesEvent
    | PublishEvent
    | ServedEvent
    | EngineEvent
    | EvenedEvent
    | SlotFailedEvent
    | SlotRecoveredEvent
    | SpanEvent
    | StepEvent
    | RunEnd
)

EVENT_TYPES: dict[str, type] = {
    "run_start": RunStart,
    "shift": ShiftEvent,
    "plan": PlanEvent,
    "lease": LeaseEvent,
    "load": LoadEvent,
    "sequences": SequencesEvent,
    "publish": PublishEvent,
    "served": ServedEvent,
    "engine": EngineEvent,
    "evened": EvenedEvent,
    "slot_failed": SlotFailedEvent,
    "slot_recovered": SlotRecoveredEvent,
    "span": SpanEvent,
    "step": StepEvent,
    "run_end": RunEnd,
}

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


def reason_class(reason: str) -> str:
    """What a plan's reason says apart from its numbers: reasons that differ in those only are one.

    The controller tells a plan when this changes, and the report counts by it.
    """
    return _NUMBER.sub("N", reason)


def missing_fields(event: Mapping[str, Any]) -> list[str]:
    """Fields that a known kind must have and this event lacks, sorted; empty for a good event and an unknown kind.

    Tests of emitters assert that this is empty; the reader leaves out (and names) events for which it is not.
    """
    event_type = EVENT_TYPES.get(str(event.get("kind")))
    if event_type is None:
        return sorted({"t_s", "kind"} - event.keys())
    return sorted(cast(Any, event_type).__required_keys__ - event.keys())
