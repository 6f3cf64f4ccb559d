"""The record of a run, as far as it needs no run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl_pivot.config.files import folder_in_use
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
    assert folder_in_use(first.directory), "the check before Ray sees it"
    assert record_in(tmp_path, "yours").directory != first.directory
    del first
    assert record_in(tmp_path, "mine").directory == tmp_path / "mine", "a run that ended leaves the folder to the next"


@pytest.mark.parametrize(
    ("scores", "counted", "mean"), [([1.0, 0.0], 2, 0.5), ([float("nan"), 0.5], 1, 0.5), ([float("inf")], 0, None)]
)
def test_what_is_no_number_is_no_reward(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scores: list[float],
    counted: int,
    mean: float | None,
) -> None:
    record = record_in(tmp_path, "mine")
    monkeypatch.setattr(record, "_rewards_of", lambda keys, partition: (scores, [{} for _ in scores]))
    keys = [f"p_{number}" for number in range(len(scores))]
    batch = SimpleNamespace(keys=keys, tags=[{"response_len": 3} for _ in keys], partition_id="train")
    with caplog.at_level(logging.WARNING):
        record.step_ends(batch, {}, {}, step=1)
    record.close("finished", 0)
    step, end = map(json.loads, (record.directory / "trainer.jsonl").read_text().splitlines())
    assert (step["responses"], step["rewards"], step["reward_mean"]) == (len(scores), counted, mean)
    assert (end["responses"], end["rewards"]) == (len(scores), counted)
    assert ("are no finite numbers" in caplog.text) == (counted < len(scores))


def test_without_the_queue_nothing_is_said_to_be_lost_or_not(tmp_path: Path) -> None:
    record = record_in(tmp_path, "mine")
    record.prompts_submitted(4)
    record.close("failed", None)
    (end,) = map(json.loads, (record.directory / "trainer.jsonl").read_text().splitlines())
    assert (end["submitted"], end["in_flight"], end["lost"]) == (4, None, None)
