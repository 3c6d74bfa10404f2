"""Announces this process and finds others, with both kinds of discovery: the file itself, and etcd."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

import pd_cache
from launch.discovery.membership import Directory, View
from pd_cache.cluster import (
    ENGINES,
    About,
    CacheServerNode,
    Capacity,
    ClusterConfig,
    EngineNode,
    EtcdDiscovery,
    MasterNode,
    Node,
    NodeRecord,
    ReferenceEngineConfig,
)
from pd_cache.cluster.checks import ELECTION_S
from pd_cache.cluster.schema import data_parallel
from pd_cache.errors import ConfigError
from transfer.settings import mooncake_version


def open_directory(config: ClusterConfig, on_change: Callable[[View], None] | None = None) -> Directory:
    """Opens the directory that the file's `discovery` section describes. With etcd, the nodes of the file
    count until etcd has been read for the first time.

    `on_change` gets each new view, including the first one. It must return quickly. Raises ConfigError if a
    password or certificate for etcd cannot be read.
    """
    if isinstance(config.discovery, EtcdDiscovery):
        from launch.discovery.etcd import EtcdWatch

        seeds = [record for record in file_records(config) if not record.address.endswith(":0")]
        if on_change is not None:
            on_change(View(tuple(seeds)))
        return EtcdWatch(config.discovery, config.name, seeds=seeds, on_change=on_change)
    view = View(tuple(sorted(file_records(config), key=lambda record: record.name)))
    if on_change is not None:
        on_change(view)
    return Directory(view)


class Member:
    """Announces this process's node to the cluster when it is ready, and leaves when it ends."""

    def __init__(self, config: ClusterConfig, node: Node) -> None:
        """Announces nothing yet. Raises ConfigError if a password or certificate cannot be read."""
        self._config = config
        self._node = node
        self._registration: Any = None
        self.about = About(version=pd_cache.__version__, mooncake=mooncake_version())
        """The facts that other nodes learn about this node; with static discovery they read these from the
        node's `/health`. A node with a cache, or with a program in another environment, replaces it before
        `announce`."""
        self.master: str | None = None
        """The address at which a client of the pool expects the master. Set it before `announce`."""
        if isinstance(config.discovery, EtcdDiscovery):
            from launch.discovery.etcd import EtcdRegistration

            self._registration = EtcdRegistration(config.discovery, config.name)

    def announce(self, address: str) -> None:
        """Announces that this node can be used at `address`. Returns immediately, even if etcd does not
        answer. Call it only once."""
        record = describe_node(self._config, self._node, address)
        record = msgspec.structs.replace(record, master=self.master).telling(self.about)
        if self._registration is not None:
            self._registration.announce(record)

    def leave(self) -> None:
        """Announces that this node leaves. Waits no longer than a call to etcd may take. May be called
        twice."""
        if self._registration is not None:
            self._registration.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def describe_node(config: ClusterConfig, node: Node, address: str) -> NodeRecord:
    """Returns the record of a node of the file that answers at `address`."""
    capacity, model = Capacity(), None
    engine = config.engine if isinstance(node, EngineNode) else None
    if isinstance(engine, ReferenceEngineConfig):
        model, tokens = engine.model.name, engine.num_blocks * engine.block_size
        capacity = Capacity(
            kv_tokens=tokens, max_model_len=engine.max_model_len, max_running=engine.max_running
        )
    elif engine is not None:
        model = engine.name or engine.model
    capacity = msgspec.structs.replace(capacity, segment_bytes=config.segment_size(node))
    ranks: list[tuple[str, str]] = []
    if isinstance(node, EngineNode) and node.events_port:
        ranks = [config.event_addresses(node, rank) for rank in data_parallel(config.engine, node)[1]]
    events, replays = ranks[0] if ranks else (None, None)
    metrics_port: int | None = getattr(node, "metrics_port", None)
    return NodeRecord(
        name=node.name,
        role=node.role,
        address=address,
        instance=uuid.uuid4().hex,
        metrics=None if metrics_port is None else f"http://{node.host}:{metrics_port}",
        lease_ttl_ms=node.lease_ttl_ms if isinstance(node, MasterNode) else 0,
        model=model,
        capacity=capacity,
        events=events,
        replays=replays,
        ranks=tuple(ranks[1:]),
        version=pd_cache.__version__,
    )


def file_records(config: ClusterConfig) -> list[NodeRecord]:
    """Returns what the file itself says about its nodes."""
    etcd = isinstance(config.discovery, EtcdDiscovery)
    records = []
    for node in config.nodes:
        scheme = "http://" if node.role in (*ENGINES, "proxy") else ""
        if node.role == "proxy" and config.proxy.tls is not None:
            scheme = "https://"
        address = f"{scheme}{node.host}:{getattr(node, 'port', 0)}"
        if isinstance(node, CacheServerNode) and (node.url or etcd or config.master.port):
            address = config.server_url(node)
        record = msgspec.structs.replace(describe_node(config, node, address), instance="", version="")
        if isinstance(node, CacheServerNode) and not (record.address.endswith(":0") or node.metrics_port):
            # `launch` may run it, at a port that the file does not say
            record = msgspec.structs.replace(record, metrics=None)
        records.append(record)
    return records


def known_master(config: ClusterConfig) -> str | None:
    """Returns the master's address for Mooncake's clients; None if the file alone does not give it."""
    written = any(isinstance(node, MasterNode) and node.port for node in config.nodes)
    return config.master_address if config.masters.ha or written else None


def master_of(config: ClusterConfig, view: View) -> str | None:
    """Returns the address of the pool's master: the file's, or that of the registered one; None if both are
    unknown."""
    return known_master(config) or next((record.address for record in view.by_role("master")), None)


def find_master(config: ClusterConfig, timeout_s: float) -> ClusterConfig:
    """Returns the same cluster with its masters in it: those of the file, or those that registered.

    Raises ConfigError if no master is found within `timeout_s`.
    """
    discovery, elected = config.discovery, config.masters.ha
    if not isinstance(discovery, EtcdDiscovery) or (
        config.by_role("master") if elected else known_master(config)
    ):
        return config
    deadline = time.monotonic() + timeout_s
    with open_directory(config) as directory:
        while not (found := directory.view().by_role("master")):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no master of the cluster {config.name} registered in etcd ({', '.join(discovery.endpoints)}) "
                    f"within {timeout_s:g} s; is one running, and is `name` the same in its file?"
                )
            time.sleep(0.05)
    others = (node for node in config.nodes if node.role != "master")
    return msgspec.structs.replace(config, nodes=(*others, *map(_master, found if elected else found[:1])))


def _master(record: NodeRecord) -> MasterNode:
    host, _, port = record.address.rpartition(":")
    lease = record.lease_ttl_ms or MasterNode(name="default").lease_ttl_ms
    return MasterNode(
        name=record.name,
        host=host,
        port=int(port),
        metrics_port=0,
        lease_ttl_ms=lease,
        client_ttl_s=ELECTION_S,
    )
