"""What the CPU platform changes in verl, against what happens without it, in one child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl_pivot.verl_ext import cpu_patches

SCENARIO = """
import json, sys
import torch
import verl
import verl.utils.distributed as distributed
import verl.utils.fsdp_utils as fsdp_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

report = {}
method = "file://" + sys.argv[1]
import os
os.environ.update(DIST_INIT_METHOD=method, RANK="0", WORLD_SIZE="1")
try:
    distributed.initialize_global_process_group_ray.__wrapped__()
    report["unpatched_group"] = "built"
except Exception as error:
    report["unpatched_group"] = str(error)
distributed.initialize_global_process_group_ray()
value = torch.ones(1)
torch.distributed.all_reduce(value)
report["patched_group"] = value.item()

model = torch.nn.Linear(2, 2, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

def fill(value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.fill_(value)

def saved_before_an_update(save):
    fill(1.0)
    shards, spec = save(model)
    fill(2.0)
    return float(shards["weight"][0].mean())

def after_a_step(save):
    # what the trainer does for the second mini-batch: keep the new weights, look back at the old ones, go on
    fill(1.0)
    old = save(model)
    fill(2.0)
    new = save(model)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, *old)
    seen = float(next(model.parameters())._local_tensor.mean())
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, *new)
    return seen, float(next(model.parameters())._local_tensor.mean())

original = fsdp_utils.fsdp2_sharded_save_to_cpu.__wrapped__
from verl_pivot.verl_ext.snapshot_worker import copying
report["saved"] = {
    "original": saved_before_an_update(original),
    "patched": saved_before_an_update(fsdp_utils.fsdp2_sharded_save_to_cpu),
    "worker": saved_before_an_update(copying(original)),
}
report["step"] = {
    "original": after_a_step(original),
    "patched": after_a_step(fsdp_utils.fsdp2_sharded_save_to_cpu),
    "worker": after_a_step(copying(original)),
}
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl_pivot.verl_ext.snapshot_worker import SnapshotActorWorker
from types import SimpleNamespace

def handlers_over(save):
    fsdp_utils.fsdp2_sharded_save_to_cpu = save
    worker = object.__new__(SnapshotActorWorker)
    worker._strategy_handlers, worker.config = None, SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    return [worker.copy_handler.__qualname__, getattr(worker.copy_handler, "patched_by", None),
            worker.copy_handler is worker.copy_handler, worker.restore_handler.__qualname__]

patched = fsdp_utils.fsdp2_sharded_save_to_cpu
report["handlers"] = {"original": handlers_over(original), "patched": handlers_over(patched)}

import tiny_models
from transformers import AutoConfig
from verl.utils import model as model_utils
path = tiny_models.model_dir(tiny_models.DENSE)
critic = AutoConfig.from_pretrained(path, attn_implementation="sdpa", num_labels=1, classifier_dropout=0.0)
try:
    model_utils.load_valuehead_model.__wrapped__(path, torch.float32, critic, False)
    report["unpatched_critic"] = "loaded"
except Exception as error:
    report["unpatched_critic"] = str(error.__cause__)
loaded = model_utils.load_valuehead_model(path, torch.float32, critic, False)
report["critic"] = list(loaded(torch.ones(1, 3, dtype=torch.long)).logits.shape)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    environ = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["PYTHONPATH"] = f"{Path(__file__).parent.parent}:{environ.get('PYTHONPATH', '')}"  # tiny_models
    command = [sys.executable, "-c", SCENARIO, str(rendezvous)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.contract
def test_process_group_names_each_device_once(report: dict[str, Any]) -> None:
    assert "Duplicate device type" in report["unpatched_group"]
    assert report["patched_group"] == 1.0


@pytest.mark.contract
def test_snapshot_is_not_an_alias(report: dict[str, Any]) -> None:
    assert report["saved"] == {"original": 2.0, "patched": 1.0, "worker": 1.0}


@pytest.mark.contract
def test_looking_back_at_old_weights_keeps_the_update(report: dict[str, Any]) -> None:
    assert report["step"]["original"] != [1.0, 2.0]
    assert report["step"]["patched"] == report["step"]["worker"] == [1.0, 2.0]


@pytest.mark.contract
def test_worker_copies_once(report: dict[str, Any]) -> None:
    restore = "fsdp2_sharded_load_from_cpu"
    assert report["handlers"] == {
        "original": ["copying.<locals>.save_copies", None, True, restore],
        "patched": ["fsdp2_sharded_save_to_cpu", "own-snapshot", True, restore],
    }


@pytest.mark.contract
def test_critic_has_the_attention_of_its_configuration(report: dict[str, Any]) -> None:
    assert "flash" in report["unpatched_critic"].lower()
    assert report["critic"] == [1, 3, 1]


def module_with(function: Any) -> ModuleType:
    module = ModuleType("verl.utils.fsdp_utils")
    module.fsdp2_sharded_save_to_cpu = function  # type: ignore[attr-defined]
    return module


def test_changed_signature_is_refused() -> None:
    module = module_with(lambda model, copy: None)
    with pytest.raises(RuntimeError, match=r"own-snapshot.*\('model', 'copy'\)"):
        cpu_patches.apply(cpu_patches.OWN_SNAPSHOT, module)


def test_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu_patches, "installed_verl", lambda: "0.9.2")
    module = module_with(lambda model: None)
    before = module.fsdp2_sharded_save_to_cpu
    cpu_patches.apply(cpu_patches.OWN_SNAPSHOT, module)
    assert module.fsdp2_sharded_save_to_cpu is before
    assert "own-snapshot is made for 0.9.1" in caplog.text


def test_applying_twice_wraps_once() -> None:
    module = module_with(lambda model: ({}, None))
    cpu_patches.apply(cpu_patches.OWN_SNAPSHOT, module)
    wrapped = module.fsdp2_sharded_save_to_cpu
    cpu_patches.apply(cpu_patches.OWN_SNAPSHOT, module)
    assert module.fsdp2_sharded_save_to_cpu is wrapped


@pytest.mark.parametrize("patch", cpu_patches.PATCHES, ids=lambda patch: patch.name)
def test_every_patch_says_where_why_and_until_when(patch: cpu_patches.VerlPatch) -> None:
    file, line = patch.location.split(":")
    assert file == patch.module.replace(".", "/") + ".py" and int(line) > 0
    assert patch.reason and patch.remove_when
