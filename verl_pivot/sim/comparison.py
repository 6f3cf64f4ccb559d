"""Deployments side by side on one scenario, each at the best split that was found for it, on the cores there are.

Used by ``verl-pivot simulate`` and ``verl-pivot plan``. Whoever shifts may begin where the best fixed pools are, and
the look-ahead planner also where the harmonic rule is best: it has no search of its own, since its runs take longest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from verl_pivot.sim.deployments import Deployment
from verl_pivot.sim.result import SimResult
from verl_pivot.sim.scenario import Scenario
from verl_pivot.sim.search import best_of


def compare(
    scenario: Scenario,
    *,
    steps: int,
    tries: int,
    deployments: Collection[Deployment] = tuple(Deployment),
    on_run: Callable[[], None] = lambda: None,
) -> list[SimResult]:
    """Results in the order of ``deployments``, fixed pools among them; ``on_run`` is called from some thread when one
    of ``runs_of`` is over. Raises SimulationStuck when one never ends."""
    wanted = set(deployments) | {Deployment.DISAGGREGATED}
    found: dict[Deployment, list[Future[SimResult]]] = {}
    with ProcessPoolExecutor(
        min(len(wanted), os.cpu_count() or 1), initializer=_worker, initargs=(os.getpid(),)
    ) as pool:

        def begin(deployment: Deployment, **options: Any) -> Future[SimResult]:
            future = pool.submit(best_of, scenario, deployment, steps, tries, **options)
            future.add_done_callback(lambda _: on_run())
            found.setdefault(deployment, []).append(future)
            return future

        others = wanted - {Deployment.DISAGGREGATED, Deployment.HARMONIC, Deployment.LOOKAHEAD}
        try:
            # The longest chain first: one needs the split of the other.
            fixed = begin(Deployment.DISAGGREGATED)
            for deployment in sorted(others)[:1]:
                begin(deployment)
            splits = [fixed.result().split]
            harmonic = begin(Deployment.HARMONIC, also=splits) if Deployment.HARMONIC in wanted else None
            for deployment in sorted(others)[1:]:
                begin(deployment)
            if Deployment.LOOKAHEAD in wanted:
                splits = splits if harmonic is None else [harmonic.result().split, *splits]
                for split in dict.fromkeys(splits):
                    begin(Deployment.LOOKAHEAD, split=split)
            results = {each: max((f.result() for f in of), key=lambda r: r.tokens_per_s) for each, of in found.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():  # none of them has anything to clean up
                worker.kill()
            raise
    return [results[deployment] for deployment in deployments]


def _worker(parent: int) -> None:
    """A worker leaves ctrl-C to its parent, and ends with it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def runs_of(deployments: Collection[Deployment]) -> int:
    """The most runs that ``compare`` begins."""
    return len(set(deployments) | {Deployment.DISAGGREGATED}) + (Deployment.LOOKAHEAD in deployments)
