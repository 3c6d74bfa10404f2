"""The bench of KV events, with few blocks, and the synthetic trace of agents that routing is measured with."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

from bench.lib.agents import agent_trace
from bench.lib.trace import BLOCK_TOKENS, read_request
from bench.suites.events import measure_index, measure_removals


def test_an_index_is_rebuilt_and_every_lookup_finds_what_was_published(tmp_path: Path) -> None:
    row = measure_index(tmp_path, 4000, 2)
    assert (row["blocks"], row["publishers"]) == (4000, 2)
    assert 30 < row["bytes_per_block"] < 200


def test_removals_of_a_real_pool_are_heard_of() -> None:
    row = measure_removals(100, 3, 0.05)
    assert 0 < row["late_p50_s"] <= row["late_max_s"]


def test_agents_have_what_their_source_says_and_the_trace_is_one() -> None:
    requests = agent_trace(300, seed=5)
    for request in requests[:200]:
        assert read_request(__import__("msgspec").json.encode(request)) == request
    assert requests == sorted(requests, key=lambda request: request.timestamp) == agent_trace(300, seed=5)
    system = tuple(range(22))
    assert all(tuple(request.hash_ids[:22]) == system for request in requests)
    sessions: dict[int, list[int]] = {}
    for request in requests:
        sessions.setdefault(request.hash_ids[22], []).append(request.input_length)
    turns = [len(lengths) for lengths in sessions.values()]
    assert 25 <= statistics.median(turns) <= 35
    growth = [later - earlier for lengths in sessions.values() for earlier, later in itertools.pairwise(lengths)]
    assert 1900 <= statistics.fmean(growth) <= 2500
    assert min(growth) > 0
    assert all(len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS) for request in requests)
