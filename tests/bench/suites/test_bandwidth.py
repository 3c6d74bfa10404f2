"""`pd-cache bench bandwidth` and `bench lookup` on this machine alone, at small size, and what they make of figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.suites.bandwidth import checks_of
from tests.support.pool import ROOT


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
        assert row["link_gbps"] is None
    assert report["checks"][0]["ok"]
    assert "Both at once" in file.read_text()


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
    nodes = {name: {"host": name, "machine": "m"} for name in names}
    return {
        "about": {}, "nodes": nodes, "object_bytes": 1 << 20, "objects": 2, "rounds": 3, "results": rows,
        "at_once": [row for row in rows if row["from"] != row["to"]],
    }  # fmt: skip


def test_put_and_get_are_checked_against_raw_and_bytes_against_what_was_put() -> None:
    checks = checks_of(_figures("ab"))
    assert [(check.value, check.ok) for check in checks] == [(6, True), (0.8, False), (1.0, True), (0.8, False), (1.0, True)]  # fmt: skip
    assert not checks_of(_figures("ab", equal=False))[0].ok
    assert len(checks_of(_figures("a"))) == 1, "there is no raw figure within a node"
