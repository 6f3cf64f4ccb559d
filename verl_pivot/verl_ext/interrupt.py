"""What ctrl-C tells: where the run's record is and how to go on, instead of a traceback through hydra and Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from omegaconf import DictConfig, OmegaConf

from verl_pivot.config.schema import ResourceShiftConfig


def explain_interrupts(config: DictConfig, shift_config: ResourceShiftConfig) -> None:
    """From now on a KeyboardInterrupt that ends this process prints one message. Called in the driver, before Ray; the
    exit status stays that of an interrupted process."""
    message = _message(config, shift_config)
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(message, file=sys.stderr)
        else:
            otherwise(kind, error, trace)

    sys.excepthook = hook


def _message(config: DictConfig, shift_config: ResourceShiftConfig) -> str:
    run = Path(shift_config.observe.directory) / str(OmegaConf.select(config, "trainer.experiment_name"))
    frequency = OmegaConf.select(config, "trainer.save_freq")
    if isinstance(frequency, int) and frequency > 0:
        way_on = "To go on from the last checkpoint, give the same command with trainer.resume_mode=auto."
    else:
        way_on = f"There is no checkpoint to go on from (trainer.save_freq={frequency})."
    return f"\nverl-pivot: interrupted. What was recorded so far: verl-pivot report {run}\n{way_on}"
