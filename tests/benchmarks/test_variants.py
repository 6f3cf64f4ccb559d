from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.deployments import results
from benchmarks.deployments.processes import gpu_to_slot
from benchmarks.deployments.variants import SLOTS, SPLITS, Variant, overrides, resource_shift, switching
from benchmarks.deployments.workload import Assets, Workload
from benchmarks.deployments_cpu import PLANNERS_ON, TRAIN_POOLS, parse

ASSETS = Assets(*(Path("/assets") / name for name in ("policy", "judge", "train", "val", "agent.yaml")))


def options_of(variant: Variant) -> dict[str, str]:
    arguments = overrides(variant, Workload(), ASSETS, Path("/run") / variant.name, 7, 0.5)
    pairs = [argument.lstrip("+").split("=", 1) for argument in arguments]
    options = dict(pairs)
    assert len(options) == len(pairs), "an option is given twice"
    return options


VARIANTS = [
    Variant("colocated", SLOTS),
    *SPLITS,
    Variant("enable_switch", 1, 2, 1),
    *(resource_shift(staleness, train) for staleness in (0, 1) for train in TRAIN_POOLS),
    *(resource_shift(staleness, train, "lookahead") for staleness, train in PLANNERS_ON),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_deployment_has_four_slots_and_the_same_work(variant: Variant):
    options = options_of(variant)
    gpus = int(options["trainer.n_gpus_per_node"])
    if int(options.get("actor_rollout_ref.rollout.nnodes", 0)):
        gpus += int(options["actor_rollout_ref.rollout.n_gpus_per_node"])
    if options["reward.reward_model.enable_resource_pool"] == "true":
        gpus += int(options["reward.reward_model.n_gpus_per_node"])
    assert gpus == SLOTS
    same = options_of(VARIANTS[0])
    for option in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_files"):
        assert options[option] == same[option]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_responses_divide_among_the_training_ranks(variant: Variant):
    work = Workload()
    for prompts in (work.prompts_per_step, work.mini_batch_prompts):
        assert prompts * work.responses_per_prompt % (variant.train * work.micro_batch) == 0


def test_names_are_unique():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_asynchronous_deployments_update_as_often_and_keep_one_batch_ahead():
    verl, ours = options_of(SPLITS[0]), options_of(resource_shift(1, 1))
    mini_batches = verl["trainer.v1.separate_async.parameter_sync_step"]
    assert mini_batches == ours["trainer.resource_shift.train.mini_batches_per_step"] == "4"
    assert ours["trainer.resource_shift.staleness"] == "1"


def test_planners_differ_in_nothing_else():
    both = [options_of(resource_shift(1, 2, planner)) for planner in ("harmonic", "lookahead")]
    name = resource_shift(1, 2, "lookahead").name
    assert name == "resource_shift_lookahead_staleness1_train2"
    different = {key for key in both[0] if both[0][key].replace("harmonic", "lookahead") != both[1][key]}
    different -= {"trainer.experiment_name", "trainer.default_local_dir", "trainer.resource_shift.observe.directory"}
    assert both[1]["trainer.resource_shift.planner.name"] == "lookahead" and not different


def test_virtual_gpus_become_slots_in_their_order():
    assert gpu_to_slot(["10", "2", "2", "0", "1"], 4) == {"0": 0, "1": 1, "2": 2, "10": 3}


@pytest.mark.parametrize("gpus", [["0", "1", "2"], ["0", "1", "2", ""], ["0", "1", "2", "0,1"]])
def test_processes_without_one_virtual_gpu_each_are_an_error(gpus: list[str]):
    with pytest.raises(ValueError, match="virtual GPUs"):
        gpu_to_slot(gpus, 4)


def test_the_best_of_each_family_counts():
    variants = {SPLITS[0]: 5.0, SPLITS[1]: 6.0, resource_shift(0, 1): 8.0, resource_shift(0, 2): 9.0}
    variants |= {resource_shift(1, 1): 7.0}
    entries = {v.name: {"family": v.family, "equal_speed_tokens_per_s": rate} for v, rate in variants.items()}
    assert results.best(entries) == {
        "verl_disaggregated": SPLITS[1].name,
        "resource_shift_staleness0": "resource_shift_staleness0_train2",
        "resource_shift_staleness1": "resource_shift_staleness1_train1",
    }


def test_enable_switch_takes_the_best_split_that_has_hybrid_engines():
    rates = {SPLITS[0].name: 5.0, SPLITS[1].name: 6.0, SPLITS[3].name: 9.0}
    chosen = switching({name: {"equal_speed_tokens_per_s": rate} for name, rate in rates.items()})
    assert (chosen.kind, chosen.rollout, chosen.judge, chosen.hybrid) == ("enable_switch", 1, 2, True)
    assert switching({}).rollout == SPLITS[0].rollout


def test_results_of_other_conditions_do_not_mix():
    document = results.new_document(Workload(), 0.5, 5, 2)
    assert results.same_conditions(document, results.new_document(Workload(), 0.5, 3, 1))
    assert not results.same_conditions(document, results.new_document(Workload(), 0.4, 5, 2))
    assert not results.same_conditions(document, results.new_document(Workload(hidden=256), 0.5, 5, 2))


def test_nothing_to_time_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["--steps", "0"])
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["verl", "resource_shift_staleness1_train4", "verl_disaggregated"])
def test_a_part_is_named_by_how_it_begins(name: str):
    assert parse(["--only", name]).only == [name]


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(["--only", "colocated"])
    assert "verl_colocated" in capsys.readouterr().err
