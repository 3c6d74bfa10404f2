"""The simulation of the proxy's policies, on traces small enough to know the answer."""

from itertools import pairwise

import pytest

from bench.lib.trace import BLOCK_TOKENS, Request
from bench.suites.routing import agent_trace, compare, simulate
from tests.support.cli import cli_json
from tests.support.traces import conversations, write_trace


def test_an_idle_node_makes_nobody_wait_and_a_busy_one_makes_the_next_wait_for_what_is_left():
    alone = simulate(
        [Request(0, 1000, []), Request(2000, 1000, [])], "round_robin", 1, BLOCK_TOKENS, rate=1000
    )
    assert alone.queueing == [0, 0]
    queued = simulate(
        [Request(0, 1000, []), Request(400, 1000, [])], "round_robin", 1, BLOCK_TOKENS, rate=1000
    )
    assert queued.queueing == pytest.approx([0, 0.6])


def test_prefix_aware_keeps_conversations_where_they_are():
    routers = ("round_robin", "guess", "guess_of_size", "events", "oracle")
    (robin, *others), _ = compare("trace", conversations(13, 6), routers, 4, 40 * BLOCK_TOKENS * 3, rate=1e5)
    for row in others:
        assert row["hit_rate"] > 2 * robin["hit_rate"]
        assert row["queueing_p99_s"] <= robin["queueing_p99_s"]


def test_traces_are_reported_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.suites.routing._AGENTS", 2)
    monkeypatch.setattr("bench.suites.routing._CACHES", (50000,))
    file = write_trace(tmp_path / "trace.jsonl.gz", conversations(8, 4))
    report = cli_json("bench", "routing", "--trace", file)
    policies = ["round_robin", "least_loaded", "guess", "guess_of_size", "events", "oracle"]
    assert [row["policy"] for row in report["results"]] == 2 * policies
    assert ("trace", 32) in {(row["workload"], row["requests"]) for row in report["results"]}


def test_each_agents_prompt_goes_on_from_its_last_one_behind_one_system_prompt():
    (first, *others), alone = agent_trace(3), agent_trace(1)
    assert all(request.hash_ids[:22] == first.hash_ids[:22] for request in others)
    assert len({request.hash_ids[22] for request in [first, *others]}) == 3
    for before, after in pairwise(alone):
        assert after.whole_blocks[: len(before.whole_blocks)] == before.whole_blocks
        assert after.timestamp > before.timestamp
