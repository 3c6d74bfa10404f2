"""`bench replay`: shrunken chunks, what a pool has room for, and small traces on real pools."""

import pytest

from bench.lib.pool import local_pool, raw_client
from bench.suites.replay import UNBOUNDED, ShrunkenCache, allotted_bytes, checks_of, measure_pool
from tests.support.cli import cli, cli_json
from tests.support.traces import conversations, write_trace

# --- shrunken chunks ----------------------------------------------------------------------------------------


def test_pages_of_a_block_are_told_from_all_others_and_from_damaged_ones():
    cache = ShrunkenCache(3, 2048)
    pages = cache.tensors[0]
    cache.fill([7, 8, 9])
    cache.target(3)
    assert not cache.arrived([7, 8, 9])
    pages[3:] = pages[:3]
    assert cache.arrived([7, 8, 9])
    assert not cache.arrived([7, 9, 8])
    pages[5].flatten()[-1] = 1.0
    assert cache.arrived([7, 8])
    assert not cache.arrived([7, 8, 9])


def test_a_pool_has_room_for_as_many_objects_as_the_allocator_sets_aside():
    size, segment = (1 << 20) + 32, 16 << 20
    with local_pool(segment) as master, raw_client(master) as client:
        stored = 0
        while client.put(f"key-{stored}", bytes(size)) == 0:
            stored += 1
    assert stored == segment // allotted_bytes(size) == 14


# --- what is asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("--capacity", "0"), "0 is not in the range x>=1"),
        (("--capacity", "100"), "has room for 3641 chunks of 4096 bytes"),
        (("--evict", "0.9", "0"), "0 is not in the range 0<x<=1"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(tmp_path, arguments, told):
    trace = write_trace(tmp_path / "trace.jsonl", conversations(1, 1))
    assert told in " ".join(cli("bench", "replay", "--trace", trace, *arguments, code=2).output.split())


# --- on real pools ------------------------------------------------------------------------------------------


def test_an_unbounded_pool_reaches_the_ideal_and_a_bounded_one_evicts(tmp_path, monkeypatch):
    # so large that Mooncake's least segment has room for some hundred chunks only
    monkeypatch.setattr("bench.suites.replay.CHUNK_BYTES", 65536)
    requests = conversations(30, 6)
    trace = write_trace(tmp_path / "trace.jsonl.gz", requests)
    (bounded,) = cli_json("bench", "replay", "--trace", trace, "--capacity", 256, "--check")["results"]
    unbounded = measure_pool(requests, 540, UNBOUNDED, 0.9, 0.1)
    ideal = pytest.approx((3 + 6 + 9 + 12 + 15) / (3 + 6 + 9 + 12 + 15 + 18))
    assert unbounded["hit_rate"] == unbounded["ideal"] == ideal
    assert (unbounded["stored"], unbounded["damaged"], unbounded["refused"]) == (540, 0, 0)
    assert bounded["hit_rate"] < bounded["ideal"]
    # more than there is room for; on a busy machine some stores come too late
    assert bounded["stored"] > 256
    assert all(check.ok for check in checks_of([unbounded]))
