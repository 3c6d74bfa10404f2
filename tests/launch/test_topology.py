"""Which nodes run here, on which ports, and whether this machine can carry them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from launch import topology
from launch.roles import client_command
from pd_cache.config import (
    CacheConfig,
    ClusterConfig,
    DecodeNode,
    EtcdDiscovery,
    LocalTier,
    MasterNode,
    ModelConfig,
    MooncakeTier,
    ProxyConfig,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    Source,
    StoreNode,
    TlsConfig,
)
from pd_cache.errors import ConfigError
from transfer.settings import ByteSize, TransferSettings

ENGINE = ReferenceEngineConfig(model=ModelConfig(name="m", random=RandomModel()))
ELSEWHERE = "192.0.2.1"  # reserved for documentation: never an address of this machine


def cluster(*nodes: object, **sections: object) -> ClusterConfig:
    return ClusterConfig(nodes=(MasterNode(name="master", port=0, metrics_port=0), *nodes), engine=ENGINE, **sections)  # type: ignore[arg-type]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def messages(config: ClusterConfig) -> list[str]:
    source = Source(Path("c.yaml"), msgspec.to_builtins(config, enc_hook=str), {})
    return [str(source.error(problem)) for problem in topology.machine_problems(config, topology.local_nodes(config))]


def test_only_nodes_of_this_machines_addresses_are_local() -> None:
    config = cluster(DecodeNode(name="here"), DecodeNode(name="there", host=ELSEWHERE))
    assert [node.name for node in topology.local_nodes(config)] == ["master", "here"]


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


def test_a_machine_that_can_carry_the_nodes_has_no_problems() -> None:
    assert messages(cluster(DecodeNode(name="a"), ProxyNode(name="p", port=0))) == []


def test_a_reference_engine_without_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else name)
    (message,) = messages(cluster(DecodeNode(name="a")))
    assert "engine.kind" in message
    assert "pip install 'pd-cache[reference]'" in message
    assert messages(cluster(DecodeNode(name="a", host=ELSEWHERE))) == []


def test_a_taken_port_is_named(taken_port: int) -> None:
    (message,) = messages(cluster(DecodeNode(name="a", port=taken_port)))
    assert f"nodes[1].port: {taken_port}: is taken on 127.0.0.1 by another process" in message


def test_memory_that_is_not_there_is_named() -> None:
    much = ByteSize(1 << 50)
    (message,) = messages(cluster(StoreNode(name="s", segment_size=much)))
    assert "nodes[1].segment_size: '1024TiB': is more than this machine's memory" in message
    (message,) = messages(cluster(transfer=TransferSettings(staging_size=much)))
    assert "transfer.staging_size: '1024TiB': is more than this machine's memory" in message
    tiers = (LocalTier(capacity=much), MooncakeTier())
    (message,) = messages(cluster(cache=CacheConfig(tiers=tiers)))
    assert "cache.tiers[0].capacity: '1024TiB': is more than this machine's memory" in message
    half = ByteSize(topology.machine_memory() * 6 // 10)
    both = [StoreNode(name=name, segment_size=half) for name in ("s", "t")]
    (message,) = messages(cluster(*both))
    assert "nodes[2].segment_size" in message
    assert "with the other segments here" in message


def test_files_of_keys_and_certificates_that_are_not_here_are_named(tmp_path: Path) -> None:
    tls = TlsConfig(ca_file=str(tmp_path / "ca"), cert_file=__file__, key_file=__file__)
    etcd = EtcdDiscovery(endpoints=("127.0.0.1:1",), user="u", password_file=str(tmp_path / "password"), tls=tls)
    proxy = ProxyConfig(api_keys_file=str(tmp_path / "keys"), node_key_file=str(tmp_path / "key"))
    told = messages(cluster(ProxyNode(name="p", port=0), proxy=proxy, discovery=etcd))
    assert [message.split(": ")[1] for message in told] == [
        "proxy.api_keys_file", "proxy.node_key_file", "discovery.password_file", "discovery.tls.ca_file",
    ]  # fmt: skip
    assert all("cannot be read on this machine, or is not there" in message for message in told)
    elsewhere = ClusterConfig(nodes=(ProxyNode(name="p", host=ELSEWHERE),), proxy=proxy, discovery=etcd)
    assert messages(elsewhere) == [], "they are needed where the nodes are"


def test_rdma_needs_devices_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "rdma_devices", lambda: ("mlx5_0",))
    config = cluster(transfer=TransferSettings(protocol="rdma", devices=("mlx5_0", "mlx5_7")))
    (message,) = messages(config)
    assert "transfer.devices[1]: 'mlx5_7': is no RDMA device of this machine; there are: mlx5_0" in message
    monkeypatch.setattr(topology, "rdma_devices", lambda: ())
    assert "this machine has no RDMA device" in messages(config)[0]


def test_a_port_that_others_must_know_cannot_be_left_open() -> None:
    config = cluster(DecodeNode(name="a"), ProxyNode(name="p"))
    problem = topology.unresolved_port(config, config.nodes[1])
    assert problem is not None
    assert problem.path == ("nodes", 0, "port")
    assert topology.unresolved_port(config, config.nodes[0]) is None


def test_an_engine_that_shares_memory_has_to_know_the_port_of_its_hosts_store_node() -> None:
    store, engine = StoreNode(name="s", segment_size=ByteSize(1 << 30)), DecodeNode(name="d", port=1)
    master = MasterNode(name="master")
    config = ClusterConfig(nodes=(master, store, engine), engine=ENGINE, transfer=TransferSettings(client="host"))
    problem = topology.unresolved_port(config, engine)
    assert problem is not None
    assert problem.path == ("nodes", 1, "port")
    assert topology.unresolved_port(config, store) is None
    registered = msgspec.structs.replace(config, discovery=EtcdDiscovery(endpoints=("127.0.0.1:2379",)))
    assert topology.unresolved_port(registered, engine) == problem, "it is asked for before anything is registered"
    told = msgspec.structs.replace(config, transfer=TransferSettings(client="host", client_address="127.0.0.1:7"))
    assert topology.unresolved_port(told, engine) is None


def test_a_mooncake_client_has_a_thread_for_every_call_that_the_engines_of_its_host_can_have_under_way() -> None:
    store = StoreNode(name="s", segment_size=ByteSize(1 << 30), port=5)
    here = [DecodeNode(name=f"d{index}") for index in range(3)]
    transfer = TransferSettings(client="host", threads=2)
    config = cluster(store, *here, DecodeNode(name="there", host=ELSEWHERE), transfer=transfer)
    command = client_command(config, store)
    assert "--threads=21" in command  # 3 engines: 2 transfers each way, 2 control calls and a ping
    assert {"--host=127.0.0.1:5", "--port=5"} < set(command)
    assert "--threads=9" in client_command(config, msgspec.structs.replace(store, threads=9))
