"""`pd-cache bench bandwidth` and `bench lookup` on this machine alone, at small size, and what they make of figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib.page import page
from bench.lib.report import Table
from bench.suites.bandwidth import NodeMemory, all_at_once, checks_of, link_gbps, one_at_a_time, report_of
from tests.support.pool import ROOT
from transfer.settings import Timeouts


def run(bench: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """What it printed as JSON, and on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", "bench", bench, *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)), done.stderr


def test_bandwidth_between_two_processes_here(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    small = ("--size", "64KiB", "--objects", "3", "--rounds", "1", "--at-once", "--html", str(file))
    report, _ = run("bandwidth", *small)
    assert [(row["from"], row["to"]) for row in report["results"]] == [
        ("node-0", "node-0"), ("node-0", "node-1"), ("node-1", "node-0"), ("node-1", "node-1"),
    ]  # fmt: skip
    for row in report["results"] + report["at_once"]:
        assert row["bytes_equal"]
        assert row["put_gbps"] > 0
        assert row["get_gbps"] > 0
        assert (row["raw_read_gbps"] is None) == (row["from"] == row["to"])
        assert row["link_gbps"] is None, "loopback has no rate"
    assert report["checks"][0]["ok"]
    assert "<svg" in file.read_text()


def test_lookups_of_one_and_more_clients_here(tmp_path: Path) -> None:
    small = ("--rounds", "5", "--clients", "2,1", "--tokens", "512,4096", "--seconds", "0.2")
    report, _ = run("lookup", *small, "--html", str(tmp_path / "report.html"))
    assert [row["tokens"] for row in report["results"]] == [4096, 32768, 131072]
    assert [(row["clients"], row["tokens"]) for row in report["clients"]] == [(1, 512), (1, 4096), (2, 512), (2, 4096)]
    for row in report["clients"]:
        assert row["ratio"] == pytest.approx(row["lookup_per_s"] / row["raw_per_s"])
    assert [check["name"] for check in report["checks"]][-1] == "hash_ms, 131072 tokens"


def test_a_batch_that_no_machine_can_hold_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.suites.bandwidth", "--size", "1GiB", "--objects", "512"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 1
    assert "make --size or --objects smaller" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_at_a_time_is_every_pair_and_those_within_a_node_are_last() -> None:
    groups = one_at_a_time(("a", "b", "c"))
    assert sorted(pair for group in groups for pair in group) == [(x, y) for x in "abc" for y in "abc"]
    assert all(len(group) == 1 for group in groups)
    assert groups[-3:] == [[("a", "a")], [("b", "b")], [("c", "c")]]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_at_once_every_node_sends_to_one_and_receives_from_one_at_a_time(count: int) -> None:
    nodes = [str(index) for index in range(count)]
    groups = all_at_once(nodes)
    assert len(groups) == count - 1
    for group in groups:
        assert sorted(begin for begin, _ in group) == sorted(end for _, end in group) == nodes
    met = [pair for group in groups for pair in group]
    assert sorted(met) == [(x, y) for x in nodes for y in nodes if x != y]


def _opened(gbit: float | None) -> NodeMemory:
    return NodeMemory("a", "host", "segment", "engine", 0, "eth0", gbit, "machine", Timeouts())


@pytest.mark.parametrize(
    ("rates", "hosts", "given", "expected"),
    [
        ((100.0, 25.0), ("1", "2"), None, 25 / 8),
        ((100.0, None), ("1", "2"), None, None),
        ((100.0, 100.0), ("1", "1"), None, None),
        ((None, None), ("1", "1"), 8.0, 1.0),
    ],
)
def test_the_link_between_two_nodes_is_the_slower_one(
    rates: tuple[float | None, float | None], hosts: tuple[str, str], given: float | None, expected: float | None
) -> None:
    opened = {"a": _opened(rates[0]), "b": _opened(rates[1])}
    assert link_gbps("a", "b", opened, dict(zip("ab", hosts, strict=True)), given) == expected
    assert link_gbps("a", "a", opened, {"a": "1", "b": "1"}, given) is None


def _figures(names: str, equal: bool = True) -> dict[str, Any]:
    rows = [
        {
            "from": begin, "to": end, "put_gbps": 4.0, "get_gbps": 5.0, "bytes_equal": equal,
            "raw_write_gbps": None if begin == end else 5.0, "raw_read_gbps": None if begin == end else 5.0,
            "link_gbps": None if begin == end else 10.0,
        }
        for begin in names
        for end in names
    ]  # fmt: skip
    nodes = {name: {"host": name, "machine": "m", "link": "eth0", "link_gbit": 80.0} for name in names}
    return {
        "about": {}, "nodes": nodes, "object_bytes": 1 << 20, "objects": 2, "rounds": 3, "results": rows,
        "at_once": [row for row in rows if row["from"] != row["to"]],
    }  # fmt: skip


def test_put_and_get_are_checked_against_raw_and_bytes_against_what_was_put() -> None:
    checks = checks_of(_figures("ab"))
    assert [(check.value, check.ok) for check in checks] == [(6, True), (0.8, False), (1.0, True), (0.8, False), (1.0, True)]  # fmt: skip
    assert not checks_of(_figures("ab", equal=False))[0].ok
    assert len(checks_of(_figures("a"))) == 1, "there is no raw figure within a node"


def test_the_report_has_the_link_where_it_is_known() -> None:
    figures = _figures("ab")
    pairs = next(part for part in report_of(figures).parts if isinstance(part, Table))
    assert pairs.columns[-2:] == ["link", "get / link"]
    assert pairs.rows[1][-2:] == [10.0, 0.5]
    for row in figures["results"]:
        row["link_gbps"] = None
    pairs = next(part for part in report_of(figures).parts if isinstance(part, Table))
    assert pairs.columns[-1] == "get / raw"
    assert "All at once, together" in page(report_of(figures), checks_of(figures), figures)
