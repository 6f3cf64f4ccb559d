"""The record of a run, as far as it needs no run."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl_pivot.config.schema import ObserveConfig, ResourceShiftConfig
from verl_pivot.verl_ext.run_record import RunRecord

pytestmark = pytest.mark.contract


def record_in(folder: Path, name: str) -> RunRecord:
    config = OmegaConf.create({"trainer": {"experiment_name": name}})
    return RunRecord(config, ResourceShiftConfig(observe=ObserveConfig(directory=str(folder))))


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    first = record_in(tmp_path, "mine")
    with pytest.raises(RuntimeError, match=r"another run is writing to .*mine; .*trainer\.experiment_name"):
        record_in(tmp_path, "mine")
    assert record_in(tmp_path, "yours").directory != first.directory
    del first
    assert record_in(tmp_path, "mine").directory == tmp_path / "mine", "a run that ended leaves the folder to the next"
