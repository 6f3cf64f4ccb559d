"""Makes what the quick start needs: ``python recipes/quickstart/prepare.py --out outputs/quickstart/assets``.

Two cores, a few minutes, no download. Made once: a second call with the same settings returns at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.quickstart.assets import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, outside any package


OTHER_DEADLINE_S = 1800.0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    from recipes.quickstart.assets import Settings, already_made
    from verl_pivot.store.locks import lock_within

    settings = Settings(options.seed, options.train_prompts, options.val_prompts, options.effort)
    options.out.mkdir(parents=True, exist_ok=True)
    lock = lock_within(options.out, OTHER_DEADLINE_S)
    if lock is None:
        print(f"another process has been filling {options.out} for {OTHER_DEADLINE_S:g} s; end it, or choose --out")
        return 1
    try:
        if already_made(options.out, settings) and not options.force:
            print(f"{options.out} is up to date")
            return 0
        return _make(options, settings)
    finally:
        lock.release()


def _make(options: argparse.Namespace, settings: Settings) -> int:
    import torch

    from recipes.quickstart.assets import make_assets

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    started_s = time.monotonic()
    with ProgressBars() as bars:
        meta = make_assets(options.out, settings, bars.update)
    print(_summary(options.out, meta, time.monotonic() - started_s))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the quick start's policy and judge and write its prompts.")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart/assets"), help="directory to fill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-prompts", type=int, default=1024)
    parser.add_argument("--val-prompts", type=int, default=64)
    parser.add_argument("--effort", type=float, default=1.0, help="factor on training steps; below 1 for tests only")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to train with")
    parser.add_argument("--force", action="store_true", help="make everything again")
    return parser.parse_args(arguments)


class ProgressBars:
    """One progress bar a stage."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            if not self._progress.console.is_terminal:  # no bars there
                print(f"{stage} ...", flush=True)
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done)


def _summary(out: Path, meta: dict[str, Any], seconds: float) -> str:
    policy, judge = meta["policy"], meta["judge"]
    return (
        f"made {out} in {seconds:.0f} s: the policy is right {policy['accuracy']:.0%} of the time "
        f"(mean response {policy['response_tokens_mean']:.0f} tokens, longest {policy['response_tokens_max']}), "
        f"the judge agrees with the truth on {judge['agreement']:.1%} of its responses"
    )


if __name__ == "__main__":
    raise SystemExit(main())
