"""What cannot be simulated is refused by name: cost files, workloads, clusters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_cases import FILE, scenario, workload

from verl_pivot.sim.models import CostFile, CostFileError
from verl_pivot.sim.scenario import SimCosts
from verl_pivot.sim.workload import LengthSpec

GOOD: dict[str, Any] = {
    "models": [
        {
            "model": "tiny",
            "tp": 1,
            "floor_ms": 1.0,
            "base_ms": 1.0,
            "per_seq_ms": 0.1,
            "attn_base_ms": 0.1,
            "attn_ns_per_token": 1.0,
            "params_b": 1.0,
            "kv_bytes_per_token": 1000,
        }
    ],
    "hardware": {"X": {"mem_gb": 80, "bf16_tflops": 100}, "pcie_gb_s": 64},
}


def test_a_good_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD))
    file = CostFile.read(path)
    assert file.model("TINY").active_parameters == 1e9 and file.gpu("X").memory_bytes == 80e9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("models"), "has no list named models"),
        (lambda c: c["models"][0].pop("model"), r"models\[0\] has no name"),
        (lambda c: c["models"][0].pop("per_seq_ms"), r"\(tiny\): .* lacks per_seq_ms"),
        (lambda c: c["models"][0].update(floor_ms=-1.0), r"\(tiny\): floor_ms is -1.0: it must be a number"),
        (lambda c: c["models"][0].update(floor_ms="fast"), "floor_ms is fast: it must be a number"),
        (lambda c: c["models"][0].update(base_ms=10**400), "base_ms is 10000000000"),
        (lambda c: c["models"][0].update(params_b=10**400), "params_b is 10000000000"),
        (lambda c: c.update(hardware=[]), r"hardware is \[\]: it must be an object"),
        (lambda c: c.update(training_mfu=0.4), "training_mfu is 0.4: it must be an object"),
        (lambda c: c.update(training_mfu={"dense": 40}), "dense is 40: a share of the peak is at most 1"),
        (lambda c: c["models"][0].update(params_b=0), "params_b is 0: it must be a number above 0"),
        (lambda c: c["models"][0].update(tp=1.5), "tp is 1.5: it must be a whole number"),
        (lambda c: c["models"][0].pop("kv_bytes_per_token"), "lacks kv_bytes_per_token"),
        (lambda c: c.pop("hardware"), "names no hardware"),
        (lambda c: c["hardware"]["X"].pop("mem_gb"), "hardware.X lacks mem_gb"),
        (lambda c: c.update(training_mfu={"dense": -0.4}), "training_mfu: dense is -0.4"),
    ],
)
def test_a_bad_file_is_refused_by_name(change: Any, said: str) -> None:
    content = copy.deepcopy(GOOD)
    change(content)
    with pytest.raises(CostFileError, match=said):
        CostFile.from_json(content, "cost file x.json")


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("missing.json", "broken.json"):
        with pytest.raises(CostFileError, match=f"{name} cannot be read"):
            CostFile.read(tmp_path / name)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: scenario(gpus=6, policy="Qwen2.5-32B"), "gpus is 6: it must be a multiple of the GPUs of a slot, 4"),
        (lambda: scenario(gpus=0), "gpus is 0"),
        (lambda: scenario(policy="GPT-9"), r"no costs for GPT-9; there are: Qwen2.5-1.5B \(tp 1\)"),
        (lambda: FILE.gpu("B300"), "no hardware named B300; there is: H20"),
        (lambda: scenario(staleness=-1), "staleness is -1"),
        (lambda: LengthSpec(0, 1.0, 100), "median_tokens is 0"),
        (lambda: LengthSpec(200, 1.0, 100), "median_tokens is 200: it must be from 1 to max_tokens"),
        (lambda: LengthSpec(10, 9.0, 100), "sigma is 9.0"),
        (lambda: LengthSpec(10, 1.0, 100, correlation=2), "correlation is 2"),
        (lambda: LengthSpec(10, 1.0, 100, growth=0), "growth is 0"),
        (lambda: workload(mini_batch_prompts=5), "prompts_per_step is 16: it must be a multiple"),
        (lambda: workload(prompt_tokens=0), "prompt_tokens is 0"),
        (lambda: SimCosts(publish_s=-1), "publish_s is -1"),
        (
            lambda: scenario(workload=workload(response=LengthSpec(600, 0.5, 10_000_000))),
            "fewer than the longest sequence has",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_model_that_no_gpu_holds() -> None:
    content = json.loads(json.dumps(GOOD))
    content["models"][0]["params_b"] = 100
    model = CostFile.from_json(content, "x").model("tiny")
    with pytest.raises(ValueError, match="tiny does not fit: 200 GB of weights on 1 x X leave"):
        model.kv_tokens(CostFile.from_json(content, "x").gpu("X"))


def test_lengths_have_the_shape_that_was_asked_for() -> None:
    spec = LengthSpec(1000, 0.8, 100_000, correlation=0.6, growth=2.0)
    rng = np.random.default_rng(0)
    effects = rng.standard_normal(4000)
    logs = np.log(spec.draw(rng, effects, 4))
    assert np.median(logs) == pytest.approx(np.log(1000), abs=0.03)
    assert logs.std() == pytest.approx(0.8, rel=0.03)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.6, abs=0.03)
    late = np.log(spec.draw(rng, effects, 4, progress=1.0))
    assert np.exp(np.median(late) - np.median(logs)) == pytest.approx(2.0, rel=0.05)
