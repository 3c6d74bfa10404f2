"""Traces: how they are read, and what is refused."""

import json

import pytest

from bench.lib.trace import SimulatedLru, TraceError, hit_rate_of, read_trace
from tests.support.traces import conversations, write_trace

GOOD = {"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 2366]}


def test_a_trace_is_read_gzipped_or_not_in_the_order_of_its_times(tmp_path):
    requests = conversations(8, 4)
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        assert read_trace(write_trace(tmp_path / name, requests)) == requests
    assert read_trace(write_trace(tmp_path / "trace.jsonl", requests[::-1])) == requests


def test_a_session_of_aiperfs_says_again_all_that_was_said(tmp_path):
    file = tmp_path / "dataset.jsonl"
    line = '{"session_id": "a", "timestamp": 0.0, "input_length": 1100, "output_length": 60, "hash_ids": [0, 1, 7]}'
    file.write_text(
        line
        + """
{"session_id": "a", "delay": 500.0, "input_length": 700, "output_length": 60, "hash_ids": [8, 9]}
{"session_id": "b", "timestamp": 0.0, "input_length": 1030, "output_length": 60, "hash_ids": [0, 1, 10]}"""
    )
    first, second, other = read_trace(file)
    assert (first.timestamp, second.timestamp, other.timestamp) == (0, 60 * 1000 / 60 + 500, 3_600_000 / 2)
    assert second.input_length == 1100 + 60 + 700
    assert second.hash_ids[:2] == [0, 1]
    assert len({*first.hash_ids, *second.hash_ids}) == 3 + 2
    assert hit_rate_of([first, second, other], SimulatedLru()) == 2 * 1024 / (1100 + 1860 + 1030)
    file.write_text(line.replace(", 7", ""))
    with pytest.raises(TraceError, match="line 1: 2 hash_ids"):
        read_trace(file)


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
