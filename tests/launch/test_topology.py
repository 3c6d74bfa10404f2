"""Which nodes run here, and on which ports."""

from __future__ import annotations

import pytest

from launch import topology
from pd_cache.cluster import (
    ClusterConfig,
    DecodeNode,
    MasterNode,
    ModelConfig,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    StoreNode,
)
from pd_cache.cluster.machine import local_nodes
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize

ENGINE = ReferenceEngineConfig(model=ModelConfig(name="m", random=RandomModel()))
ELSEWHERE = "192.0.2.1"  # reserved for documentation: never an address of this machine


def cluster(*nodes: object, **sections: object) -> ClusterConfig:
    return ClusterConfig(nodes=(MasterNode(name="master", port=0, metrics_port=0), *nodes), engine=ENGINE, **sections)  # type: ignore[arg-type]


def test_only_nodes_of_this_machines_addresses_are_local() -> None:
    config = cluster(DecodeNode(name="here"), DecodeNode(name="there", host=ELSEWHERE))
    assert [node.name for node in local_nodes(config)] == ["master", "here"]


def test_port_zero_becomes_a_free_port_for_each_local_node_and_others_stay() -> None:
    config = topology.choose_ports(
        cluster(
            DecodeNode(name="a"),
            DecodeNode(name="b"),
            DecodeNode(name="c", port=7),
            DecodeNode(name="d", host=ELSEWHERE),
        )
    )
    chosen = [config.master.port, config.master.metrics_port, *(node.port for node in config.nodes[1:3])]  # type: ignore[union-attr]
    assert all(chosen)
    assert len(set(chosen)) == 4
    assert [node.port for node in config.nodes[3:]] == [7, 0]  # type: ignore[union-attr]


def test_the_node_to_launch_is_the_named_one_or_the_only_one_here() -> None:
    config = cluster(
        DecodeNode(name="a"), DecodeNode(name="b", host=ELSEWHERE), StoreNode(name="s", segment_size=ByteSize(1))
    )
    assert topology.pick_node(config, "decode", None).name == "a"
    assert topology.pick_node(config, "decode", "b").name == "b"
    with pytest.raises(ConfigError, match="no decode node of that name in the file; there are: a, b"):
        topology.pick_node(config, "decode", "s")
    with pytest.raises(ConfigError, match="no node of the role prefill; roles there: decode, master, store"):
        topology.pick_node(config, "prefill", None)
    twice = cluster(DecodeNode(name="a"), DecodeNode(name="b"))
    with pytest.raises(ConfigError, match=r"2 decode nodes belong on this machine \(a, b\); say which with --node"):
        topology.pick_node(twice, "decode", None)


def test_a_port_that_others_must_know_cannot_be_left_open() -> None:
    config = cluster(DecodeNode(name="a"), ProxyNode(name="p"))
    problem = topology.unresolved_port(config, config.nodes[1])
    assert problem is not None
    assert problem.path == ("nodes", 0, "port")
    assert topology.unresolved_port(config, config.nodes[0]) is None
