"""What cannot work although each value is allowed: checks over the whole file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pd_cache.config.schema import (
    ClusterConfig,
    EngineNode,
    EtcdDiscovery,
    MasterNode,
    ProxyNode,
    StaticDiscovery,
    StoreNode,
)
from transfer.settings import MIN_SEGMENT

KeyPath = tuple[str | int, ...]

_ELECTION_S = 20


class Problem(NamedTuple):
    """Something in the file that cannot work."""

    path: KeyPath
    message: str


def consistency_problems(config: ClusterConfig) -> Iterator[Problem]:
    """What cannot work although each value is allowed, first things first."""
    seen: dict[str, int] = {}
    for index, node in enumerate(config.nodes):
        if node.name in seen:
            yield Problem(
                ("nodes", index, "name"), f"is also the name of nodes[{seen[node.name]}]; names must be unique"
            )
        seen[node.name] = index
    masters = [index for index, node in enumerate(config.nodes) if isinstance(node, MasterNode)]
    yield from _master_problems(config, masters)
    ports: dict[tuple[str, int], str] = {}
    for index, node in enumerate(config.nodes):
        for field in ("port", "metrics_port"):
            port = getattr(node, field, 0)
            if not port:
                continue
            other = ports.setdefault((node.host, port), node.name)
            if other != node.name or (field == "metrics_port" and getattr(node, "port", 0) == port):
                yield Problem(("nodes", index, field), f"{other} uses this port of {node.host} already")
        size = getattr(node, "segment_size", None)
        if size is not None and (0 < size < MIN_SEGMENT or (size == 0 and isinstance(node, StoreNode))):
            allowed = "at least 16MiB" if isinstance(node, StoreNode) else "0 for none, or at least 16MiB"
            yield Problem(("nodes", index, "segment_size"), f"must be {allowed}, the smallest that Mooncake takes")
    engines = [index for index, node in enumerate(config.nodes) if isinstance(node, EngineNode)]
    if engines and config.engine is None:
        yield Problem(("engine",), f"missing, but nodes[{engines[0]}] is a {config.nodes[engines[0]].role} node")
    static = isinstance(config.discovery, StaticDiscovery)
    if static and any(isinstance(node, ProxyNode) for node in config.nodes) and not config.by_role("decode"):
        yield Problem(("nodes",), "a proxy needs at least one decode node to send requests to")
    if config.engine is not None:
        block, chunk = config.engine.block_size, config.cache.chunk_size
        if chunk % block:
            near = sorted({max(1, chunk // block) * block, (chunk // block + 1) * block})
            yield Problem(
                ("cache", "chunk_size"),
                f"must be a multiple of engine.block_size {block}, e.g. {' or '.join(map(str, near))}",
            )
        if config.engine.num_blocks * block < config.engine.max_model_len:
            yield Problem(
                ("engine", "num_blocks"),
                f"{config.engine.num_blocks} blocks of {block} tokens cannot hold one request of max_model_len "
                f"{config.engine.max_model_len}; at least {-(-config.engine.max_model_len // block)} are needed",
            )
    if config.engine is not None and config.cache.hash_mode != "tokens":
        yield Problem(("cache", "hash_mode"), "the reference engine has no block hashes; use tokens")
    slowest = max(config.transfer.timeouts.get_ms, config.transfer.timeouts.put_ms)
    for index, node in enumerate(config.nodes):
        if isinstance(node, MasterNode) and node.lease_ttl_ms < slowest:
            yield Problem(
                ("nodes", index, "lease_ttl_ms"),
                f"a read that outlives its lease is lost, and transfer.timeouts allow one "
                f"{slowest} ms; make this at least that",
            )


def _master_problems(config: ClusterConfig, masters: list[int]) -> Iterator[Problem]:
    found = f"{len(masters)} nodes have the role master"
    discovery = config.discovery
    if config.masters.ha:
        if not isinstance(discovery, EtcdDiscovery):
            yield Problem(("master", "ha"), "masters are elected in etcd: it needs `discovery: {kind: etcd, ...}`")
        elif discovery.user is not None or discovery.tls is not None:
            yield Problem(
                ("master", "ha"),
                "Mooncake's election knows neither users nor TLS; give it an etcd without, or one master",
            )
        for index, node in enumerate(config.nodes):
            if isinstance(node, MasterNode) and node.client_ttl_s < _ELECTION_S:
                yield Problem(
                    ("nodes", index, "client_ttl_s"),
                    f"segments, and the keys in them, must outlive an election, which takes up to 18 s; "
                    f"make this at least {_ELECTION_S}",
                )
    elif len(masters) > 1:
        yield Problem(("nodes", masters[1]), f"{found}; there must be exactly one, unless `master: {{ha: true}}`")
    elif not masters and isinstance(discovery, StaticDiscovery):
        yield Problem(("nodes",), f"{found}; there must be exactly one")
