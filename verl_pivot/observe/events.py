"""The event log: every process of a run appends JSON lines to a file of its own; the reader merges them.

A line is ``{"t_s": seconds since the start of the run, "kind": ..., ...}``; ``kinds`` has the fields of each kind.
The first line that a process writes also carries ``t0_unix_s`` and ``wall_time``: it tells the reader where one run
ends and the next begins when the same directory is used again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from verl_pivot.observe.kinds import Event, missing_fields

logger = logging.getLogger(__name__)

Listener = Callable[[dict[str, Any]], None]


class EventLog:
    """Appends events to one JSONL file. Safe to use from several threads; one process per file.

    Every line reaches the operating system before ``emit`` returns, so a killed process loses at most the line it was
    writing. It is also the run's clock (``runtime.ports.Clock``): take ``t_start_s`` of a shift or span from
    ``now_s()`` of the same log.
    """

    def __init__(
        self,
        path: str | Path,
        t0_unix_s: float | None = None,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """Opens ``path`` for appending, making its directory.

        ``t0_unix_s`` is the Unix time of the run's start. The process that begins the run leaves it out and hands
        ``log.t0_unix_s`` to the others. ``now_s`` replaces the clock (the simulator's seconds since its start).
        """
        self.path = Path(path)
        self.t0_unix_s = time.time() if t0_unix_s is None else float(t0_unix_s)
        self._now_s = now_s
        # The wall clock is read once: later steps of it (NTP) must not reorder this process's events.
        self._offset_s = time.time() - self.t0_unix_s - time.monotonic()
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._is_first = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(self.path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        if torn:
            self._file.write("\n")

    def now_s(self) -> float:
        """Seconds since the start of the run; never goes back within a process."""
        return self._now_s() if self._now_s is not None else self._offset_s + time.monotonic()

    def subscribe(self, listener: Listener) -> None:
        """``listener(event)`` is called for every later event, in order, in the emitting thread."""
        with self._lock:
            self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        """Appends one event. Raises ValueError when ``fields`` sets ``t_s``, or when the log is closed."""
        if "t_s" in fields:
            raise ValueError(f"event {kind!r}: t_s is set by the log; give the moment you mean as t_start_s")
        with self._lock:
            if self._file.closed:
                raise ValueError(f"event {kind!r} came after {self.path} was closed; close the log last")
            event: dict[str, Any] = {"t_s": round(self.now_s(), 6), "kind": kind, **fields}
            if self._is_first:
                event["t0_unix_s"] = self.t0_unix_s
                event["wall_time"] = datetime.now().astimezone().isoformat(timespec="milliseconds")
                self._is_first = False
            self._file.write(encode(event) + "\n")
            for listener in self._listeners:
                listener(event)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(run_dir: str | Path, run: int = 0) -> list[Event]:
    """All events of one run in ``run_dir``, from all its ``*.jsonl`` files, sorted by ``t_s``.

    Args:
        run: 1 for the oldest run of that folder, 2 for the next; 0 for the newest.

    Lines cut short by a crash, events that lack a field and copies of a log are left out with a warning. Raises
    FileNotFoundError when the directory has no event log, ValueError when it has no such run.
    """
    files = sorted(Path(run_dir).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run_dir} has no event log (*.jsonl); give the directory of a run")
    segments = _without_copies([segment for path in files for segment in _read_segments(path)])
    begun = [s.t0_unix_s for s in segments if any(e["kind"] == "run_start" for e in s.events)]
    known = sorted({t for t in begun if t is not None})
    if not 0 <= run <= max(1, len(known)):
        raise ValueError(f"run is {run}: {run_dir} holds {len(known)} run(s), counted from 1; 0 is the newest")
    t0 = known[run - 1] if known else None
    events: list[dict[str, Any]] = []
    for segment in segments:
        if t0 is None or segment.t0_unix_s is None or segment.t0_unix_s == t0:
            events += segment.events
        elif segment.t0_unix_s > known[-1]:
            logger.warning(
                "%s counts from t0_unix_s=%s, the run from %s: left out. Give the run's t0_unix_s to EventLog.",
                segment.path,
                segment.t0_unix_s,
                t0,
            )
    return cast("list[Event]", sorted(events, key=lambda e: e["t_s"]))


def encode(value: Any) -> str:
    """Strict JSON on one line: NaN and infinities become null; enums, numpy values and dataclasses plain values."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_without_nan(value), default=_plain, allow_nan=False, separators=(",", ":"))


@dataclasses.dataclass
class _Segment:
    """What one process wrote to one file for one run."""

    path: Path
    t0_unix_s: float | None
    events: list[dict[str, Any]]


def _read_segments(path: Path) -> list[_Segment]:
    segments: list[_Segment] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            event = _parse(line, path, number)
            if event is None:
                continue
            if "t0_unix_s" in event or not segments:
                segments.append(_Segment(path, event.get("t0_unix_s"), []))
            segments[-1].events.append(event)
    # A file whose very first line was lost and that was used again: its headless part is of an older run.
    return [s for s in segments if s.t0_unix_s is not None or len(segments) == 1]


def _without_copies(segments: list[_Segment]) -> list[_Segment]:
    """A log that somebody copied within the folder, perhaps while it was written, counts once."""
    kept: list[_Segment] = []
    for segment in sorted(segments, key=lambda segment: -len(segment.events)):
        begin = len(segment.events)
        of = next((s for s in kept if s.t0_unix_s is not None and s.events[:begin] == segment.events), None)
        if of is None:
            kept.append(segment)
        else:
            logger.warning("%s repeats %s and was left out", segment.path, of.path)
    return kept


def _parse(line: str, path: Path, number: int) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        logger.warning("%s:%d is cut short and was left out", path, number)
        return None
    if not isinstance(event, dict):
        logger.warning("%s:%d is not an event and was left out", path, number)
        return None
    if missing := missing_fields(event):
        logger.warning("%s:%d: event %r lacks %s and was left out", path, number, event.get("kind"), ", ".join(missing))
        return None
    return event


def _ends_torn(path: Path) -> bool:
    """Whether the file ends inside a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    """``json`` fallback. A log must never stop a run, so the last resort is ``repr``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _without_nan(dataclasses.asdict(value))
    if isinstance(value, Mapping | Sequence):
        return _without_nan(value)
    if isinstance(value, Set):
        return sorted(_without_nan(value), key=str)
    if hasattr(value, "tolist"):
        return _without_nan(value.tolist())
    return str(value) if isinstance(value, Path) else repr(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [_without_nan(item) for item in value]
    return value
