"""The simulation of the proxy's policies, on traces small enough to know the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.lib.trace import BLOCK_TOKENS, Request
from bench.suites.routing import agent_trace, compare, compare_hints, main, simulate
from tests.support.traces import conversations, write_trace


def test_an_idle_node_makes_nobody_wait_and_a_busy_one_makes_the_next_wait_for_what_is_left() -> None:
    alone = simulate([Request(0, 1000, []), Request(2000, 1000, [])], "round_robin", 1, BLOCK_TOKENS, rate=1000)
    assert alone.queueing == [0, 0]
    queued = simulate([Request(0, 1000, []), Request(400, 1000, [])], "round_robin", 1, BLOCK_TOKENS, rate=1000)
    assert queued.queueing == pytest.approx([0, 0.6])


def test_prefix_aware_keeps_conversations_where_they_are() -> None:
    rows = {row["policy"]: row for row in compare(conversations(13, 6), 4, 40 * BLOCK_TOKENS * 3, rate=1e5)}
    for router in ("guess", "guess_of_size", "events", "oracle"):
        assert rows[router]["hit_rate"] > 2 * rows["round_robin"]["hit_rate"]
        assert rows[router]["queueing_p99_s"] <= rows["round_robin"]["queueing_p99_s"]


def test_a_trace_is_reported_as_json(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "trace.jsonl.gz", conversations(8, 4))
    result = CliRunner().invoke(main, ["--trace", str(file), "--agents", "0", "--cache", "50000", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["policy"] for row in report["results"]] == [
        "round_robin", "least_loaded", "guess", "guess_of_size", "events", "oracle",
    ]  # fmt: skip
    assert report["requests"] == {"trace": 32}


def test_hints_keep_what_waits_at_the_cost_of_what_does_not() -> None:
    requests = agent_trace(20, waits=0.1)
    small = {(row["hints"], row["max_share"]): row for row in compare_hints(requests, 4, 400_000)}
    none, waits = small["none", 0.0], small["waits", 0.5]
    assert waits["after_wait_hit_rate"] > 1.25 * none["after_wait_hit_rate"]
    assert waits["hit_rate"] < none["hit_rate"]
    unbounded = compare_hints(requests, 4, 100_000_000)
    assert len({(row["hit_rate"], row["after_wait_hit_rate"]) for row in unbounded}) == 1


def test_hints_are_reported_as_json() -> None:
    result = CliRunner().invoke(main, ["--hints", "--agents", "5", "--pool", "50000", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["results"]) == 4
    assert CliRunner().invoke(main, ["--hints", "--agents", "0"]).exit_code == 2
