"""Traces: how they are read, and what is refused."""

import json

import pytest

from bench.lib.trace import BLOCK_TOKENS, Request, SimulatedLru, TraceError, hit_rate_of, read_trace
from tests.support.traces import conversations, write_trace

GOOD = {"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 2366]}


def test_a_trace_is_read_gzipped_or_not_in_the_order_of_its_times(tmp_path):
    requests = conversations(8, 4)
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        assert read_trace(write_trace(tmp_path / name, requests)) == requests
    assert read_trace(write_trace(tmp_path / "trace.jsonl", requests[::-1])) == requests


def test_a_cache_that_never_forgets_finds_the_ideal_and_a_small_one_forgets_what_was_used_longest_ago():
    requests = [Request(at, 2 * BLOCK_TOKENS + 100, [0, block, 9 + at]) for at, block in enumerate((1, 2, 1))]
    tokens = 3 * (2 * BLOCK_TOKENS + 100)
    assert hit_rate_of(requests, SimulatedLru()) == 3 * BLOCK_TOKENS / tokens
    assert hit_rate_of(requests, SimulatedLru(2)) == 2 * BLOCK_TOKENS / tokens


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"input_length": "1200"}, "Expected `int`"),
        ({"timestamp": -1}, "timestamp"),
        ({"hash_ids": [46, -47, 2366]}, "hash_ids"),
        ({"hash_ids": [46, 47]}, "2 hash_ids, but an input_length of 1200 makes 3 blocks"),
        ({"hash_ids": [46, 47, 46]}, "stands twice"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, changes, told):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in (GOOD, {**GOOD, **changes})))
    with pytest.raises(TraceError, match="line 2") as error:
        read_trace(file)
    assert told in error.value.message


def test_what_is_no_trace_at_all_is_refused(tmp_path):
    packed = write_trace(tmp_path / "t.gz", conversations(20, 5)).read_bytes()[:-20]
    for name, content, told in (
        ("t", b"timestamp\n1\n", "line 1"),
        ("t", b"\n\n", "holds no requests"),
        ("t.gz", packed, "cannot be read on"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=told):
            read_trace(tmp_path / name)
