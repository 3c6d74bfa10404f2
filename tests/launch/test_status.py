"""What `pd-cache status` says of masters that do not lead, or lead without the others. Of running clusters: test_cluster.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.status import ClusterStatus, NodeStatus, as_json
from pd_cache.cluster import Capacity, NodeRecord

GIB = 1 << 30


def master(name: str, leads: str, **fields: Any) -> NodeStatus:
    record = NodeRecord(name=name, role="master", address="10.0.0.1:1", metrics="http://10.0.0.1:2")
    return NodeStatus(record=record, leads=leads, **fields)


def store(size: int) -> NodeStatus:
    record = NodeRecord(name="s", role="store", address="10.0.0.1:3", capacity=Capacity(segment_bytes=size))
    return NodeStatus(record=record, state="not asked")


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([master("a", "leader", mounted=GIB), master("b", "standby"), store(GIB)], None),
        ([master("a", "leader"), store(GIB)], None),
        ([store(GIB)], None),
        ([master("a", "standby"), master("b", "candidate")], "none of 2 masters leads"),
        ([master("a", "leads, but does not serve yet")], "none of 1 masters leads"),
        ([master("a", "leader"), master("b", "leader")], "2 masters lead (a, b): each knows only some of the keys"),
        ([master("a", "leader", mounted=0), store(GIB)], "a has 0 B of the 1.0 GiB that nodes give; nodes that follow another"),
    ],
    ids=["well", "memory unknown", "no master registered", "none leads", "warming up", "two lead", "memory elsewhere"],
)  # fmt: skip
def test_one_master_leads_and_has_the_memory_that_nodes_give(nodes: list[NodeStatus], problem: str | None) -> None:
    status = ClusterStatus("etcd", True, nodes)
    assert status.well is (problem is None)
    shown = json.loads(as_json(status))
    assert shown["well"] is status.well
    assert [text[: len(problem or "")] for text in shown["problems"]] == ([problem] if problem else [])
