"""How fast the machine is at the moment: virtual machines share their cores' hardware with neighbours unseen."""

from __future__ import annotations

import statistics
import threading
import time

REFERENCE_S = 0.0042
"""CPU seconds of one probe at speed 1: about what a 2023 server core takes. Any constant would do for ratios."""
INTERVAL_S = 0.5


class SpeedProbe:
    """Times a fixed piece of work on the CPU, twice a second, in a thread of the benchmark: under 1% of a core.

    CPU time, not wall time: what counts is how fast a core is once one has it. That the other core is busy does not
    show in it here; were it so, deployments that idle would be made to look worse than they are.
    """

    def __init__(self) -> None:
        self._speeds: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speed_probe", daemon=True)
        self._thread.start()

    def take(self) -> float:
        """Median speed since the last call, 1 being the reference; measures once when there is none."""
        speeds, self._speeds = self._speeds, []
        return statistics.median(speeds or [_measure()])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._speeds.append(_measure())


def _measure() -> float:
    started_s = time.thread_time()
    total = 0
    for number in range(50_000):
        total += number * number & 7
    return REFERENCE_S / (time.thread_time() - started_s)
