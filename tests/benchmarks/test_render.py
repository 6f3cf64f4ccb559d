from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.deployments import results
from benchmarks.deployments.measure import StepSample
from benchmarks.deployments.variants import SPLITS, Variant, resource_shift
from benchmarks.deployments.workload import Workload


def deployments_document() -> dict[str, object]:
    document = results.new_document(Workload(), 0.5, 2, 1)
    document["environment"]["cores"] = 2
    for variant, wall_s in ((Variant("colocated", 4), 20.0), (SPLITS[0], 16.0), (resource_shift(0, 2), 10.0)):
        steps = [
            StepSample(i, wall_s, wall_s, 1000, (2.0,) * 4, wall_s / 4, staleness_mean=0.0, staleness_max=0)
            for i in (2, 3)
        ]
        document["deployments"][variant.name] = results.entry(variant, [steps], 0.5, {"observed": None})
    return json.loads(json.dumps(results.finish(document)))


def test_deployments_are_rendered_with_figures_and_ratios():
    page = render.render({"deployments_cpu.json": deployments_document()})
    row = "| 50 | 50 | 20.0 (20.0 to 20.0) | 20% 20% 20% 20% | 0.25 | 32% | 8.00 | 20% | 0.00 (at most 0) |"
    assert f"| `verl_colocated` {row}" in page
    assert "| `verl_colocated` | 32% | 3.08 |" in page
    assert "| resource_shift_staleness0_train2 / verl_colocated | 2.00 (2.00 to 2.00) | 2.00 |" in page
    assert "Measured on a real run." in page
    assert "Simulated" not in page.split("## ")[1]


@pytest.mark.parametrize(
    ("simulated", "words"),
    [(True, "**Simulated**, not measured."), (False, "Measured on a real run."), (None, "does not say whether")],
)
def test_every_document_says_whether_it_was_simulated(simulated: bool | None, words: str):
    document = {"benchmark": "other", "speedup": 1.23456}
    if simulated is not None:
        document["simulated"] = simulated
    page = render.render({"other.json": document})
    assert words in page
    assert "| speedup | 1.235 |" in page


def test_unknown_documents_show_nested_figures_and_rows():
    document = {
        "benchmark": "scaling",
        "simulated": True,
        "cluster": {"gpus": 128, "name": "a|b"},
        "rows": [{"case": "x", "gain": 1.5}, {"case": "y", "gain": None}],
        "notes": ["first note"],
    }
    page = render.render({"scaling.json": document})
    for line in ("| cluster.gpus | 128 |", "| cluster.name | a\\|b |", "| x | 1.5 |", "| y | - |", "- first note"):
        assert line in page


def test_the_page_is_made_from_all_files(tmp_path: Path):
    (tmp_path / "b.json").write_text(json.dumps({"benchmark": "b", "simulated": False}))
    (tmp_path / "a.json").write_text(json.dumps({"benchmark": "a", "simulated": True}))
    assert render.main(["--results", str(tmp_path), "--out", str(tmp_path / "R.md")]) == 0
    page = (tmp_path / "R.md").read_text()
    assert page.index("## a") < page.index("## b")


def test_a_file_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match=r"list\.json"):
        render.render({"list.json": []})  # type: ignore[dict-item]
