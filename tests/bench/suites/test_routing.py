"""The simulation of the proxy's policies, on traces small enough to know the answer."""

import pytest

from bench.lib.trace import BLOCK_TOKENS, Request
from bench.suites.routing import compare, customer_trace, simulate
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


def test_a_trace_is_reported_as_json(tmp_path):
    file = write_trace(tmp_path / "trace.jsonl.gz", conversations(8, 4))
    report = cli_json("bench", "routing", "--trace", file, "--agents", 0, "--cache", 50000)
    assert [row["policy"] for row in report["results"]] == [
        "round_robin", "least_loaded", "guess", "guess_of_size", "events", "oracle",
        "longest_prefix", "longest_prefix_idle", "random",
    ]  # fmt: skip
    assert {(row["workload"], row["requests"]) for row in report["results"]} == {("trace", 32)}


def test_one_pool_has_what_the_nodes_caches_together_have_room_for():
    # two prompts of two blocks in turn: the node with the first block gets both, and has room for one
    requests = [Request(1000 * at, 2 * BLOCK_TOKENS, [0, 1 + at % 2]) for at in range(6)]
    routers = ("longest_prefix", "round_robin")
    (first, robin), _ = compare("pairs", requests, routers, 2, 2 * BLOCK_TOKENS, pooled=True)
    assert first["hit_rate"] == pytest.approx(5 / 12)  # the first block, but for the first time
    assert first["pool_hit_rate"] == pytest.approx(9 / 12)  # 0, 1 and 2 are computed once
    assert first["hits"] == pytest.approx(9 / 5)
    assert first["prefill_time"] == pytest.approx(3 / 7)
    assert robin["hit_rate"] == pytest.approx(8 / 12)  # each node has one of the prompts


def test_the_longest_prefix_may_leave_a_node_idle():
    requests = [Request(at, BLOCK_TOKENS, [at]) for at in range(3)] + [Request(3000, BLOCK_TOKENS, [0])]
    rows, _ = compare("apart", requests, ("longest_prefix", "longest_prefix_idle"), 3, BLOCK_TOKENS)
    assert [row["hit_rate"] for row in rows] == [0.0, pytest.approx(0.25)]


def test_customers_ask_the_same_again_and_events_find_it():
    requests = customer_trace(2, scale=0.05)
    assert len({tuple(request.hash_ids[:11]) for request in requests}) == 2
    assert len({tuple(request.hash_ids) for request in requests}) == 10
    assert requests[10].hash_ids == requests[0].hash_ids
    assert all(len(request.whole_blocks) == 14 for request in requests)
    (random, events), _ = compare("customers", customer_trace(8, scale=0.05), ("random", "events"), 4, 30_000)
    assert events["hit_rate"] > 2 * random["hit_rate"]
    assert events["computed_p90_s"] < random["computed_p90_s"]


def test_each_number_of_nodes_has_a_workload_of_its_own(monkeypatch):
    pooled = ("bench", "routing", "--pooled", "--agents", 2, "--cache", 20000, "--policy", "round_robin")
    rows = cli_json(*pooled, "--nodes", 1, "--nodes", 2)["results"]
    assert [row["nodes"] for row in rows] == [1, 2]
    assert rows[0]["requests"] < rows[1]["requests"]
    monkeypatch.setattr("bench.suites.routing._STAGES", ((3, 20),))
    (row,) = cli_json(*pooled, "--customers", 1)["results"]
    assert row["workload"] == "customers"


def test_what_is_computed_is_in_the_pool_when_it_has_been_computed():
    # on two nodes at the same time, both compute it; the third finds it
    requests = [Request(at, 2 * BLOCK_TOKENS, [0, 1]) for at in (0, 1, 60_000)]
    (row,), _ = compare("same", requests, ("round_robin",), 2, 10 * BLOCK_TOKENS, pooled=True)
    assert row["pool_hit_rate"] == pytest.approx(1 / 3)
