"""`pd-cache status` where masters do not lead, or lead without the others. Of running clusters:
test_cluster.py."""

import time

import msgspec
import pytest

from launch.discovery import View
from launch.masters import Segment
from launch.operate.status import as_dict, status_table
from launch.watch.figures import NodeReading, read_node, read_samples
from launch.watch.state import ClusterStatus, NodeStatus, WatchedNodes
from pd_cache.cluster import Capacity, NodeRecord
from tests.support.cli import drawn

GIB = 1 << 30


def master(name, leads):
    record = NodeRecord(name=name, role="master", address="10.0.0.1:1", metrics="http://10.0.0.1:2")
    return NodeStatus(record=record, leads=leads)


def store(size, state="not asked", why=""):
    record = NodeRecord(name="s", role="store", address="10.0.0.1:3", capacity=Capacity(segment_bytes=size))
    return NodeStatus(record=record, state=state, why=why)


@pytest.mark.parametrize(
    "nodes, segments, problem",
    [
        ([master("a", "leader"), master("b", "standby"), store(GIB)], (Segment("10.0.0.1:3", GIB, ""),), None),
        ([master("a", "leader"), store(GIB)], None, None),
        ([store(GIB)], None, None),
        ([master("a", "standby"), master("b", "candidate")], None, "none of 2 masters leads"),
        ([master("a", "leads, but does not serve yet"), master("b", "standby")], None, "none of 2 masters leads"),
        ([master("a", "leader"), master("b", "leader")], None, "2 masters lead (a, b): each knows only some of the keys"),
        ([master("a", "leader"), store(GIB)], (), "a has 0 B of the 1.0 GiB that nodes give; start the nodes that do not run"),
    ],
    ids=["well", "memory unknown", "no master registered", "none leads", "warming up", "two lead", "memory elsewhere"],
)  # fmt: skip
def test_one_master_leads_and_has_the_memory_that_nodes_give(nodes, segments, problem):
    status = ClusterStatus("etcd", True, nodes, segments=segments, elected=True)
    assert status.well is (problem is None)
    shown = as_dict(status)
    assert shown["well"] is status.well
    assert [text[: len(problem or "")] for text in shown["problems"]] == ([problem] if problem else [])


@pytest.mark.parametrize("leads", ["", "leader"])
def test_of_masters_that_are_not_elected_nothing_is_said_of_etcd(leads):
    nodes = [master("a", leads), *([master("b", leads)] if leads else []), store(GIB)]
    (problem,) = ClusterStatus("static", True, nodes, segments=()).problems
    assert "etcd" not in problem
    (problem,) = ClusterStatus("static", True, [master("a", "leader"), store(GIB)], segments=()).problems
    assert "etcd" not in problem


METRICS = """
pd_cache_tokens_total{op="lookup",outcome="requested"} 1000
pd_cache_tokens_total{op="lookup",outcome="hit"} 100
pd_cache_prompt_tokens_total{source="at_hand"} 10
pd_cache_prompt_tokens_total{source="loaded"} 60
pd_cache_prompt_tokens_total{source="computed"} 30
pd_cache_tier_bytes{tier="\x1b[2Jdisk"} 7
pd_cache_tier_failures_total{tier="disk",reason="erofs"} 1
pd_cache_troubles_total{op="\x1b]0;title\x07",reason="gone\x1b[31m"} 3
"""


def test_nodes_of_one_model_whose_longest_prompts_differ_are_one_line_of_the_table():
    nodes = [engine(name=name, model=model, capacity=Capacity(max_model_len=length)) for name, model, length in (
        ("a", "m", 8192), ("b", "m", 4096), ("c", "m", 8192), ("d", "m", 0), ("e", "other", 512),
    )]  # fmt: skip
    line = (
        "max-model-len 4096 (b) beside 8192 (a, c): a node refuses prompts that are longer than its own limit"
    )
    for several in (nodes, nodes[2:]):
        shown = " ".join(drawn(status_table(ClusterStatus("static", True, several))).split())
        assert (line in shown, "max-model-len" in shown) == (several is nodes,) * 2


def engine(reading=None, **fields):
    watched = WatchedNodes(since_start=True)
    record = NodeRecord(**{"name": "e", "role": "decode", "address": "http://10.0.0.1:4", **fields})
    watched.update(View((record,)))
    watched.take([NodeStatus(record=record, reading=reading or read_node(read_samples(METRICS), 0.0))])
    return watched.status(0.0).nodes[0]


def test_the_hit_rate_is_of_prompts_and_not_of_lookups_which_are_repeated():
    assert engine().hit == 0.6


def test_control_sequences_in_a_nodes_metrics_do_not_reach_the_terminal():
    text = drawn(status_table(ClusterStatus("etcd", True, [engine()])), 200)
    assert "disk" in text
    assert "title" in text
    assert all(letter == "\n" or letter.isprintable() for letter in text)


def test_eighty_columns_show_every_word():
    row = engine()
    row.reading = msgspec.structs.replace(row.reading, started=0.0, running=3.0)
    status = ClusterStatus("etcd", True, [row, master("master", "leader"), store(GIB, "down", "timed out")])
    shown = " ".join(drawn(status_table(status)).split())
    assert "…" not in shown
    for part in (
        "e decode up",
        "60.0%",
        "e: errors since its start: ",
        "disk.erofs 1",
        "master up, leader",
        "s: down: timed out",
    ):
        assert part in shown


def test_eighty_columns_have_a_line_for_each_node():
    tokens = {("tokens", "loaded"): 98.5, ("tokens", "computed"): 1.5}
    started = time.time() - 200_000
    reading = NodeReading(
        at=0.0, started=started, counts=tokens, tier_bytes={"pool": 84 << 30}, queued=4, running=8
    )
    row = engine(reading, name="prefill-10", role="cache-server")
    row.segments = (Segment("10.0.0.1:9", GIB, "", status="DRAINING"),)
    text = drawn(status_table(ClusterStatus("etcd", True, [row] * 3)))
    cells = ["prefill-10", "cache-server", "up,", "draining", "56", "h", "98.5%", "pool", "84.0", "GiB", "12"]
    assert [line.split() for line in text.splitlines()[2:]] == [cells] * 3


def test_memory_of_a_node_that_does_not_answer_is_not_missed_at_the_master():
    nodes = [master("a", "leader"), store(GIB, "down", "timed out")]
    status = ClusterStatus("static", True, nodes, segments=())
    assert (status.problems, status.well) == ([], False)
