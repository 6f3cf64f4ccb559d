"""Costs come back out of the events of a run that was simulated with them, and survive the way through a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sim_cases import scenario, workload
from typer.testing import CliRunner

from verl_pivot.cli.main import app
from verl_pivot.core.cost_book import CostBook, CostBookError
from verl_pivot.core.snapshot import Role
from verl_pivot.observe.events import EventLog
from verl_pivot.observe.kinds import Event
from verl_pivot.sim.deployments import Deployment, Split
from verl_pivot.sim.fit import FitError, Fitted, RunLog, fit_runs
from verl_pivot.sim.fit_changes import reload_s
from verl_pivot.sim.fit_engines import engine_costs
from verl_pivot.sim.fit_training import train_cost, train_samples
from verl_pivot.sim.record import Recorder
from verl_pivot.sim.result import run, simulate
from verl_pivot.sim.scenario import Scenario

SETTINGS: dict[str, Any] = {
    "kv_tokens": {Role.ROLLOUT: 500_000, Role.GENRM: 400_000},
    "max_sequences": {Role.ROLLOUT: 256, Role.GENRM: 256},
    "prompt_tokens": {Role.ROLLOUT: 512.0, Role.GENRM: 1500.0},
}
SPLIT = Split(2, 3, 3)


@pytest.fixture(scope="module")
def case() -> Scenario:
    return scenario(staleness=1)


@pytest.fixture(scope="module")
def events(case: Scenario) -> list[Event]:
    recorder = Recorder()
    return recorder.events(run(case, Deployment.HARMONIC, SPLIT, steps=6, on_plan=recorder.on_plan))


@pytest.fixture(scope="module")
def fitted(events: list[Event]) -> Fitted:
    return fit_runs([RunLog(events)], **SETTINGS)


@pytest.fixture(scope="module")
def book(fitted: Fitted) -> CostBook:
    return fitted.book


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.GENRM])
@pytest.mark.parametrize("running", [2, 8, 16])
def test_decode_costs_come_back(case: Scenario, book: CostBook, role: Role, running: int) -> None:
    true = case.engines[role].decode.step_latency_s(running, 900 * running)
    assert book.roles[role].decode.step_latency_s(running, 900 * running) == pytest.approx(true, rel=0.1)


def test_training_and_shifts_come_back(case: Scenario, book: CostBook) -> None:
    tokens = 16 * 8 * 1300
    assert book.train.update_s(tokens, 2) == pytest.approx(case.update_s(tokens, 2), rel=0.2)
    for pair, seconds in book.shift_s.items():
        assert seconds == pytest.approx(case.costs.shift_s(*pair))
    assert book.publish_s == case.costs.publish_s


def test_a_run_of_the_fitted_costs_takes_as_long(case: Scenario, book: CostBook) -> None:
    # The rates in a simulated log are those of an instant of decoding: prefill takes no time there.
    roles = {
        role: replace(costs, prefill_s_per_token=case.engines[role].prefill_s_per_token)
        for role, costs in book.roles.items()
    }
    again = Scenario.from_book("again", replace(book, roles=roles), case.slots, case.workload, staleness=1)
    first, second = (simulate(s, Deployment.HARMONIC, SPLIT, steps=5, warmup=2) for s in (case, again))
    assert second.step_s == pytest.approx(first.step_s, rel=0.25)


def test_the_way_through_a_file(book: CostBook, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(book.to_json()))
    assert CostBook.from_json(json.loads(path.read_text())) == book


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("kind"), "does not say kind"),
        (lambda c: c.pop("train"), "train is missing"),
        (lambda c: c["train"].update(fixed_s=-1), "train.fixed_s is -1"),
        (lambda c: c["roles"].pop("genrm"), "roles.genrm is missing"),
        (lambda c: c["roles"]["genrm"].update(kv_tokens=0), "roles.genrm.kv_tokens is 0"),
        (lambda c: c["roles"]["genrm"]["decode"].update(base_s="x"), "roles.genrm.decode.base_s is 'x'"),
        (lambda c: c["roles"]["genrm"]["decode"].update(speed=1.0), "roles.genrm.decode: .*speed"),
        (lambda c: c["shift_s"].update({"rollout->nowhere": 1.0}), "shift_s.rollout->nowhere: it must be two roles"),
        (lambda c: c.update(publish_s=float("nan")), "publish_s is nan"),
    ],
)
def test_a_bad_book_is_refused_by_name(book: CostBook, change: Callable[[Any], Any], said: str) -> None:
    content = json.loads(json.dumps(book.to_json()))
    change(content)
    with pytest.raises(CostBookError, match=said):
        CostBook.from_json(content)


def test_a_short_run_or_an_old_log_is_refused(events: list[Event]) -> None:
    start = [event for event in events if event["kind"] == "run_start"]
    with pytest.raises(FitError, match="rollout: 0 load samples"):
        engine_costs([RunLog(start)], Role.ROLLOUT, 512.0)
    with pytest.raises(FitError, match="training: 0 steps"):
        train_cost(list(train_samples(RunLog(start), 512.0)))
    old: list[Any] = [json.loads(json.dumps(event)) for event in events]
    for event in old:
        for load in event.get("slots", {}).values() if event["kind"] == "load" else ():
            load.pop("context_tokens")
    with pytest.raises(FitError, match="how many tokens"):
        engine_costs([RunLog(old)], Role.ROLLOUT, 512.0)


def test_reloads_are_those_of_engines_that_were_awake() -> None:
    served = [
        {"t_s": 10 + wait, "kind": "served", "slot": 0, "role": "rollout", "version": 1} for wait in (1, 1.2, 30, 40)
    ]
    log: list[Any] = [{"t_s": 10, "kind": "publish", "version": 1, "duration_s": 1, "bytes": 1}, *served]
    assert reload_s(log) == pytest.approx(1.1)
    assert reload_s([]) == 0.0


def test_the_commands_fit_and_simulate(events: list[Event], tmp_path: Path) -> None:
    now_s = [0.0]
    with EventLog(tmp_path / "events.jsonl", now_s=lambda: now_s[0]) as log:
        for event in events:
            fields: dict[str, Any] = dict(event)
            now_s[0] = fields.pop("t_s")
            log.emit(**fields)
    fitted = CliRunner().invoke(app, ["fit", str(tmp_path), "--genrm-prompt-tokens", "1500"], catch_exceptions=False)
    assert fitted.exit_code == 0 and "costs.json: give it to verl-pivot simulate --costs" in fitted.output
    small = ["--gpus", "6", "--prompts", "16", "--responses", "4", "--response-median", "300", "--response-max", "2000"]
    short = ["--judge-median", "200", "--judge-max", "2000", "--steps", "1", "--tries", "2", "--staleness", "0"]
    costs = ["--costs", str(tmp_path / "costs.json")]
    simulated = CliRunner().invoke(app, ["simulate", *costs, *small, *short], catch_exceptions=False)
    assert simulated.exit_code == 0 and "as measured in" in " ".join(simulated.output.split())
    assert "warning: train.exchange_slot_s_per_token cannot be told" in fitted.output
    kept = json.loads((tmp_path / "costs.json").read_text())
    assert any(doubt.startswith("train.exchange_slot_s_per_token") for doubt in kept["doubts"])
    refused = CliRunner().invoke(app, ["fit", str(tmp_path / "nowhere")])
    assert refused.exit_code == 2 and "no event log" in refused.output
    refused = CliRunner().invoke(app, ["fit", str(tmp_path), "--rollout-prompt-tokens", "-5"])
    assert refused.exit_code == 2 and "--rollout-prompt-tokens is -5.0: it must be" in refused.output
    lines = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(line for line in lines if '"run_start"' not in line))
    refused = CliRunner().invoke(app, ["fit", str(tmp_path)])
    assert refused.exit_code == 2 and "no run_start event: its beginning is lost" in refused.output


def test_workloads_of_a_book_are_checked_too(book: CostBook) -> None:
    too_long = workload(judge_prompt_tokens_max=1_000_000)
    with pytest.raises(ValueError, match="the KV cache of a slot in genrm holds 400000 tokens"):
        Scenario.from_book("x", book, 8, too_long)
