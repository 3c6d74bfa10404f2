"""`bench scale`: wrong input, a run from given costs, and a small real validation from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from bench.lib.simulation import measuring
from bench.lib.simulation.costs import PrefillCosts, UnitCosts, read_costs, write_costs
from bench.lib.simulation.measuring import core_seconds, mean_costs, nonnegative
from bench.lib.simulation.validating import (
    EngineCount,
    OtherPrograms,
    root_of,
    runnable_threads,
    whole_conversations,
)
from bench.lib.trace import Request
from bench.suites.scale import main
from pd_cache.errors import ConfigError
from tests.support.traces import conversations, write_trace
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow(60)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl.gz", conversations(4, 4))


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    file = tmp_path / "costs.yaml"
    write_costs(UnitCosts(), file)
    return file


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def results(*arguments: object) -> dict[str, Any]:
    result = bench("--json", *arguments)
    if "address already in use" in str(result.exception):  # taken between its choice and its use, by another program
        result = bench("--json", *arguments)
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


# --- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prefil: {token_s: 1}", "prefil: no such section; there are machine"),
        ("prefill: {tokens: 1}", "prefill.tokens: no such cost; there are step_s"),
        ("prefill: 7", "prefill: expected keys and numbers, got 7"),
        ("prefill: {token_s: -1}", "prefill.token_s: Expected `float` >= 0.0, got -1"),
        ("prefill: {token_s: fast}", "prefill.token_s: Expected `float`, got 'fast'"),
        ("machine: {link_bytes_per_s: .inf}", "machine.link_bytes_per_s"),
        ("prefill: {token_s: .nan}", "prefill.token_s"),
        ("machine: {cores: 0}", "machine.cores"),
        ("engine: {chunk_tokens: 0.5}", "engine.chunk_tokens"),
        ("- 1", "expected sections"),
        ("a: [", "not valid YAML"),
    ],
)
def test_costs_that_are_none_are_refused_before_anything_is_measured(
    tmp_path: Path, trace: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    result = bench("--trace", trace, "--costs", file)
    assert result.exit_code != 0
    assert complaint in str(result.exception) + result.output
    assert "Traceback" not in result.output
    with pytest.raises(ConfigError, match=r"wrong\.yaml"):
        read_costs(file, UnitCosts())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nodes", 0),
        ("--nodes", "many"),
        ("--rate", 0),
        ("--busy", 1.5),
        ("--prefill-share", 2),
        ("--memory", "lots"),
        ("--policy", "best"),
        ("--validate", "2"),
        ("--validate", "0x1"),
        ("--validate", "axb"),
        ("--html", "/nowhere/page.html"),
    ],
)
def test_options_that_mean_nothing_are_refused(trace: Path, costs: Path, arguments: tuple[object, ...]) -> None:
    result = bench("--trace", trace, "--costs", costs, *arguments)
    assert result.exit_code == 2
    assert str(arguments[1]).split("/")[1 if "/" in str(arguments[1]) else 0] in result.output


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, trace: Path, costs: Path) -> None:
    missing = tmp_path / "missing.yaml"
    for arguments in (
        ("--trace", missing, "--costs", costs),
        ("--trace", trace, "--costs", missing),
        ("--trace", trace, "--costs", costs, "--nodes", 2, "--write-costs", missing / "costs.yaml"),
    ):
        result = bench(*arguments)
        assert result.exit_code != 0
        assert "missing.yaml" in str(result.exception) + result.output


# --- from given costs ------------------------------------------------------------------------------------------------


def test_with_all_costs_given_nothing_is_measured_and_one_seed_is_one_result(
    tmp_path: Path, trace: Path, costs: Path
) -> None:
    page, again = tmp_path / "page.html", tmp_path / "again.yaml"
    load = ("--trace", trace, "--costs", costs, "--nodes", 1, "--nodes", 4, "--nodes", 20)
    found = results(*load, "--html", page, "--write-costs", again)
    assert [step["nodes"] for step in found["results"]] == [1, 4, 20]
    assert [(step["prefill"], step["decode"]) for step in found["results"]] == [(0, 1), (2, 2), (10, 10)]
    assert found["validation"] == []
    assert {one["resource"] for one in found["limits"]} == set(found["results"][0]["asked"])
    assert results(*load)["results"] == found["results"]
    assert read_costs(again, UnitCosts()) == read_costs(costs, UnitCosts())
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "What is full first" in text


@pytest.mark.parametrize("value", [0.0, 1e-12, 1000.0])
def test_costs_that_no_machine_has_end_all_the_same(tmp_path: Path, trace: Path, value: float) -> None:
    file = tmp_path / "odd.yaml"
    seconds = ("prefill", "decode", "proxy", "node", "lookup", "store", "load", "load_own")
    odd = {
        name: msgspec.structs.replace(
            getattr(UnitCosts(), name), **dict.fromkeys(getattr(UnitCosts(), name).__struct_fields__, value)
        )
        for name in seconds
    }
    write_costs(msgspec.structs.replace(UnitCosts(), **odd), file)
    found = results("--trace", trace, "--costs", file, "--nodes", 1, "--nodes", 3, "--max-requests", 50)
    for step in found["results"]:
        assert 0 <= step["refused"] <= step["requests"] == 300
        assert all(share >= 0 for share in step["asked"].values())


def test_a_trace_of_one_request_is_enough(tmp_path: Path, costs: Path) -> None:
    trace = write_trace(tmp_path / "one.jsonl", [Request(5.0, 700, [3, 4], 0)])
    found = results("--trace", trace, "--costs", costs, "--nodes", 2)
    assert found["results"][0]["refused"] == 0


def test_what_a_file_gives_replaces_what_was_measured_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("prefill: {token_s: 0.00005}\nmachine: {cores: 64, link_bytes_per_s: 25.0e9}\n")
    measured = UnitCosts()
    found = read_costs(file, measured)
    assert (found.prefill.token_s, found.machine.cores, found.machine.link_bytes_per_s) == (5e-5, 64, 25e9)
    assert found.decode == measured.decode
    assert found.machine.crowded == measured.machine.crowded


def test_the_example_of_the_documentation_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "benchmarking.md").read_text()
    section = text.split("## `scale`")[1]
    example = tmp_path / "mine.yaml"
    example.write_text(section.split("```yaml\n")[1].split("```")[0])
    found = read_costs(example, UnitCosts())
    assert (found.machine.link_bytes_per_s, found.prefill.token_s, found.load.byte_s) == (12.5e9, 8e-5, 1e-10)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_costs_are_fitted_and_never_negative() -> None:
    rows = [(1.0, 2.0), (1.0, 32.0), (1.0, 100.0)]
    assert nonnegative(rows, [3.0 + 0.5 * count for _, count in rows]) == pytest.approx([3.0, 0.5])
    falling = nonnegative(rows, [10.0, 9.0, 8.0])
    assert min(falling) >= 0
    assert falling[0] > 0


def test_core_seconds_count_a_process_with_its_children_once() -> None:
    before = core_seconds({"self": os.getpid()})["self"]
    with subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = core_seconds({"self": os.getpid(), "child": child.pid})
        assert both["child"] >= 0.45
        assert core_seconds({"self": os.getpid()})["self"] - before >= 0.45
        assert both["self"] - before < core_seconds({"self": os.getpid()})["self"] - before
        child.communicate(b"\n")


def test_costs_of_any_size_can_be_written_and_read(tmp_path: Path) -> None:
    costs = UnitCosts(prefill=PrefillCosts(step_s=1 / 3, token_s=1.2345678e-19, context_s=123456.789))
    write_costs(costs, tmp_path / "costs.yaml")
    found = read_costs(tmp_path / "costs.yaml", UnitCosts()).prefill
    assert (found.step_s, found.token_s, found.context_s) == (0.333333, 1.23457e-19, 123457.0)


def test_the_mean_of_measurements_keeps_counts_whole() -> None:
    assert mean_costs([UnitCosts(), UnitCosts()]) == UnitCosts()


def test_the_root_of_what_rises() -> None:
    assert root_of(lambda x: 2 * x / (1 + x), 1.0, 0.0, 64.0) == pytest.approx(1.0, rel=0.05)
    assert root_of(lambda x: 1.0 + x, 0.5, 0.0, 64.0) == 0.0


def test_what_other_programs_take_is_between_nothing_and_the_machine() -> None:
    with OtherPrograms(time.monotonic()) as others:
        wait_for(lambda: len(others.threads()) >= 2)
    assert all(one.threads >= 0 and one.wake_s >= 0 for one in others.threads())
    assert 0 <= others.cores() <= (os.cpu_count() or 1)
    starts = [one.since for one in others.threads()]
    assert starts == sorted(starts)
    assert runnable_threads() >= 1


def test_a_validation_takes_whole_conversations() -> None:
    trace = conversations(400, 3)
    some = whole_conversations(trace, 30)
    assert len(some) == 30
    first = [request.hash_ids[1] for request in some[:10]]
    assert sum(request.hash_ids[1] in first for request in some) > 20
    assert whole_conversations(trace[:4], 30) == trace[:4]


# --- a real one ------------------------------------------------------------------------------------------------------


def test_a_small_real_cluster_beside_its_simulation(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LEAST_S", 0.02)  # rough figures will do
    monkeypatch.setattr(measuring, "REPEATS", 3)
    page = tmp_path / "page.html"
    found = results(
        "--trace",
        trace,
        "--validate",
        EngineCount(1, 1),
        "--rounds",
        1,
        "--validate-requests",
        8,
        "--nodes",
        2,
        "--nodes",
        4,
        "--html",
        page,
    )
    assert [one["load"] for one in found["validation"]] == ["burst", "steady"]
    for one in found["validation"]:
        assert one["real"]["failed"] == one["simulated"]["failed"] == 0
        # how near they are is for the bench to say, on a quiet machine
        for side in (one["real"], one["simulated"]):
            assert min(side["requests_per_s"], side["ttft_p50_ms"], side["core_seconds"]) > 0
    measured = found["costs"]
    for cost in ("prefill", "decode", "lookup", "store", "load", "proxy", "node"):
        assert sum(measured[cost].values()) > 0, cost
    assert measured["engine"]["kv_bytes_per_token"] == 4096
    assert page.read_text().count("<svg") == 3
