"""Checks of the whole file. They find combinations of allowed values that cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pd_cache.cluster.schema import (
    COUNTS,
    ENGINES,
    SECRET_VARIABLES,
    Argument,
    CacheServerNode,
    ClusterConfig,
    EngineNode,
    EtcdDiscovery,
    MasterNode,
    Node,
    ReferenceEngineConfig,
    StaticDiscovery,
    StoreNode,
    VllmEngineConfig,
    argument,
    data_parallel,
    tensor_parallel,
)
from pd_cache.config import MAX_SHARDS, DiskTier, LocalTier, MooncakeTier, StorageTier
from transfer.settings import MIN_SEGMENT

KeyPath = tuple[str | int, ...]

_LONGEST_SOCKET = 100
"""The most bytes of an address. The kernel takes paths of 107 bytes, and we append some."""

ELECTION_S = 20
"""The smallest `client_ttl_s` of elected masters: an election takes up to 18 s."""

_OURS = frozenset(("host", "port", "kv-transfer-config", "served-model-name", "model"))
"""Flags of `vllm serve` that pd-cache sets."""


class Problem(NamedTuple):
    """A part of the file that cannot work."""

    path: KeyPath
    message: str


def consistency_problems(config: ClusterConfig) -> Iterator[Problem]:
    """Yields combinations of allowed values that cannot work, the most basic problems first."""
    yield from _master_problems(config)
    names: dict[str, int] = {}
    ports: dict[tuple[str, int], tuple[str, str]] = {}
    for index, node in enumerate(config.nodes):
        first = names.setdefault(node.name, index)
        if first != index:
            yield Problem(
                ("nodes", index, "name"), f"is also the name of nodes[{first}]; names must be unique"
            )
        for key, port in _ports(config, node):
            if not port:
                continue  # the port is chosen later
            holder = ports.setdefault((node.host, port), (node.name, key))
            if holder != (node.name, key):
                which = "this port" if port == getattr(node, key, 0) else f"port {port}"
                yield Problem(("nodes", index, key), f"{holder[0]} already uses {which} of {node.host}")
        for key, message in _node_problems(config, node):
            yield Problem(("nodes", index, key), message)
    engines = [(index, node) for index, node in enumerate(config.nodes) if isinstance(node, EngineNode)]
    if engines and config.engine is None:
        yield Problem(("engine",), f"missing, but nodes[{engines[0][0]}] is a {engines[0][1].role} node")
    yield from _proxy_problems(config)
    yield from _engine_problems(config)
    yield from tier_problems(config.cache.tiers)
    if engines and not any(isinstance(tier, MooncakeTier) for tier in config.cache.tiers):
        yield Problem(
            ("cache", "tiers"), "prefill and decode nodes share chunks through the pool; add {kind: mooncake}"
        )
    if not config.transfer.staging_size and (caching := config.caching_nodes()):
        yield Problem(
            ("transfer", "staging_size"), f"holds no chunk, and {caching[0].name} needs room for at least one"
        )
    yield from _placement_problems(config)


def _master_problems(config: ClusterConfig) -> Iterator[Problem]:
    masters = [index for index, node in enumerate(config.nodes) if isinstance(node, MasterNode)]
    discovery = config.discovery
    if config.masters.ha:
        if not isinstance(discovery, EtcdDiscovery):
            yield Problem(("master", "ha"), "masters are elected in etcd; set `discovery: {kind: etcd, ...}`")
        elif discovery.user is not None or discovery.tls is not None:
            yield Problem(
                ("master", "ha"),
                "Mooncake's election supports neither users nor TLS of etcd; use an etcd without them, or one master",
            )
        return
    found = f"{len(masters)} nodes have the role master; there must be exactly one"
    if len(masters) > 1:
        yield Problem(("nodes", masters[1]), f"{found}, unless `master: {{ha: true}}`")
    elif not masters and isinstance(discovery, StaticDiscovery):
        yield Problem(("nodes",), found)


def _ports(config: ClusterConfig, node: Node) -> Iterator[tuple[str, int]]:
    """Yields the ports at which a node listens, each with its key."""
    yield from node.ports.items()
    if isinstance(node, EngineNode) and node.events_port:
        size, ranks = data_parallel(config.engine, node)
        for rank in ranks:
            yield "events_port", node.events_port + rank
            yield "events_port", node.events_port + size + rank


def _node_problems(config: ClusterConfig, node: Node) -> Iterator[tuple[str, str]]:
    """Yields the problems of one node, each with its key."""
    if node.host == "0.0.0.0":
        yield "host", "is not the address of one machine; write the address at which other nodes reach it"
    size = getattr(node, "segment_size", None)
    if size is not None and (0 < size < MIN_SEGMENT or (size == 0 and isinstance(node, StoreNode))):
        allowed = "at least 16MiB" if isinstance(node, StoreNode) else "0 for none, or at least 16MiB"
        yield "segment_size", f"must be {allowed}, the smallest that Mooncake takes"
    if isinstance(node, MasterNode):
        yield from _settings_of_a_master(config, node)
    elif isinstance(node, CacheServerNode):
        url = config.server_url(node)
        if len(url.encode()) > _LONGEST_SOCKET:
            yield "url", f"{url[:60]}… must have at most {_LONGEST_SOCKET} bytes"
    elif isinstance(node, EngineNode):
        yield from _settings_of_an_engine(config, node)


def _settings_of_a_master(config: ClusterConfig, node: MasterNode) -> Iterator[tuple[str, str]]:
    if config.masters.ha and node.client_ttl_s < ELECTION_S:
        yield (
            "client_ttl_s",
            f"is {node.client_ttl_s} s, but segments, and the keys in them, must outlive an election, "
            f"which takes up to 18 s; make this at least {ELECTION_S}",
        )
    slowest = max(config.transfer.timeouts.get_ms, config.transfer.timeouts.put_ms)
    if node.lease_ttl_ms < slowest:
        yield (
            "lease_ttl_ms",
            f"a read that outlives its lease is lost, and transfer.timeouts allow a read {slowest} ms; set at least that",
        )


def _settings_of_an_engine(config: ClusterConfig, node: EngineNode) -> Iterator[tuple[str, str]]:
    engine = config.engine
    if isinstance(engine, ReferenceEngineConfig):
        if node.events_port:
            yield (
                "events_port",
                "the reference engine has no prefix cache of its own, and so no events; leave it out",
            )
        for key in ("args", "env"):
            if getattr(node, key):
                yield key, "is for vLLM, and engine.kind is reference"
    elif engine is not None and node.events_port:
        if (most := 65536 - 2 * data_parallel(engine, node)[0]) < node.events_port:
            yield (
                "events_port",
                f"must be at most {most}, because each data-parallel rank takes a port, and another for replays",
            )
        if any(argument(args, "kv-events-config") is not None for args in (node.args, engine.args)):
            yield "events_port", "sets vLLM's kv-events-config, which `args` sets, too; use one of them"
    args = (node.args, engine.args) if isinstance(engine, VllmEngineConfig) else ()
    if config.proxy.roles.auto and any(argument(given, "disable-log-stats") for given in args):
        yield (
            "args",
            "vLLM gets disable-log-stats, and then reports no load to proxy.roles.auto; leave it out",
        )
    if node.cache_server is None:
        return
    server = config.node(node.cache_server)
    if not isinstance(server, CacheServerNode):
        names = ", ".join(other.name for other in config.by_role("cache-server")) or "none"
        yield "cache_server", f"is not a cache-server node; there are: {names}"
    elif server.host != node.host:
        yield (
            "cache_server",
            f"is on {server.host}, but must be on this node's host, {node.host}: they share memory",
        )
    if node.segment_size:
        yield "segment_size", "must be 0 or absent: the node's cache_server gives memory to the pool"


def _proxy_problems(config: ClusterConfig) -> Iterator[Problem]:
    if not config.by_role("proxy"):
        return
    proxy, grace = config.proxy, config.supervisor.stop_grace_s
    if isinstance(config.discovery, StaticDiscovery):
        if not config.by_role("decode", "both"):
            yield Problem(("nodes",), "a proxy needs at least one node of the role decode or both")
        yield from _role_problems(config)
    if proxy.drain_s >= grace:
        yield Problem(
            ("proxy", "drain_s"),
            f"must be less than supervisor.stop_grace_s, {grace:g} s, after which `up` kills the proxy",
        )
    if proxy.prefill_timeout_s >= proxy.request_timeout_s:
        yield Problem(
            ("proxy", "prefill_timeout_s"),
            f"is {proxy.prefill_timeout_s:g} s, and must be less than request_timeout_s, {proxy.request_timeout_s:g} s: a prefill node "
            "that hangs would leave the decode node no time",
        )


def _role_problems(config: ClusterConfig) -> Iterator[Problem]:
    roles = config.proxy.roles
    if not roles.auto:
        return
    where = ("proxy", "roles")
    if not config.by_role("both"):
        yield Problem(
            (*where, "auto"), "decides for nodes of the role both, and there are none; leave it out"
        )
    for hop, least in (("prefill", roles.min_prefill), ("decode", roles.min_decode)):
        if least > (can := len(config.by_role(hop, "both"))):
            yield Problem(
                (*where, f"min_{hop}"), f"must be at most {can}, the number of nodes that can do that"
            )
    together, engines = roles.min_prefill + roles.min_decode, len(config.by_role(*ENGINES))
    if together > engines:
        message = f"min_prefill and min_decode are {together} together; must be at most {engines}, the nodes that can do either"
        yield Problem(where, message)


def _engine_problems(config: ClusterConfig) -> Iterator[Problem]:
    engine = config.engine
    if engine is None:
        return
    block, chunk = engine.block_size, config.cache.chunk_size
    if block is not None and (block < 1 or (chunk != "auto" and chunk % block)):
        chunk = config.cache.chunk_tokens
        near = sorted({max(1, chunk // max(1, block)) * block, (chunk // max(1, block) + 1) * block})
        named = "engine.block_size" if isinstance(engine, ReferenceEngineConfig) else "engine.args.block-size"
        yield Problem(
            ("cache", "chunk_size"),
            f"must be a multiple of {named} {block}, e.g. {' or '.join(map(str, near))}",
        )
    if isinstance(engine, VllmEngineConfig):
        yield from _vllm_problems(config, engine)
        return
    if engine.num_blocks * engine.block_size < engine.max_model_len:
        yield Problem(
            ("engine", "num_blocks"),
            f"{engine.num_blocks} blocks of {block} tokens cannot hold one request of max_model_len "
            f"{engine.max_model_len}; at least {-(-engine.max_model_len // engine.block_size)} are needed",
        )
    if config.cache.hash_mode == "blocks":
        yield Problem(("cache", "hash_mode"), "the reference engine has no block hashes; use tokens")


def _vllm_problems(config: ClusterConfig, engine: VllmEngineConfig) -> Iterator[Problem]:
    nodes = [(index, node) for index, node in enumerate(config.nodes) if isinstance(node, EngineNode)]
    given: list[tuple[KeyPath, dict[str, Argument]]] = [(("engine", "args"), engine.args)]
    given += [(("nodes", index, "args"), node.args) for index, node in nodes]
    for where, args in given:
        for name, value in args.items():
            if name.replace("_", "-") in _OURS:
                yield Problem((*where, name), "is set by pd-cache itself; leave it out")
            if name.replace("_", "-") in COUNTS and (type(value) is not int or value < 0):
                yield Problem((*where, name), "must be a whole number, without quotes")
            if variable := SECRET_VARIABLES.get(name.replace("_", "-")):
                text = value[0] if isinstance(value, list) and len(value) == 1 else value
                if isinstance(text, list) or (isinstance(text, bool) and variable == "VLLM_API_KEY"):
                    yield Problem(
                        (*where, name), f"must be a single text: pd-cache passes it to vLLM in {variable}"
                    )
    if config.shards > MAX_SHARDS:
        message = f"the tensor-parallel sizes cut a chunk into {config.shards} parts; at most {MAX_SHARDS} are allowed"
        yield Problem(("engine", "args"), message)
    for index, node in nodes:
        if config.shards % (size := tensor_parallel(engine, node)):
            message = f"must be a multiple of the tensor-parallel size {size} of nodes[{index}]"
            yield Problem(("cache", "shards"), message)


def _placement_problems(config: ClusterConfig) -> Iterator[Problem]:
    if not isinstance(config.discovery, StaticDiscovery):
        return  # a node that the file does not name may own the segment
    stores = [node for node in config.nodes if isinstance(node, StoreNode)]
    segments = sum(config.segment_size(node) > 0 for node in config.nodes)
    # the name of a store node with port 0 is not known yet
    names = [f"{node.host}:{node.port}" for node in stores]
    for index, tier in enumerate(config.cache.tiers):
        if not isinstance(tier, MooncakeTier):
            continue
        if segments and tier.replicas > segments:
            yield Problem(
                ("cache", "tiers", index, "replicas"),
                f"each replica needs its own segment, and only {segments} nodes give memory to the pool",
            )
        if tier.preferred_segment not in ("own", "any", *names):
            known = (
                ", ".join(name for name in names if not name.endswith(":0"))
                or "none; give a store node a port"
            )
            yield Problem(
                ("cache", "tiers", index, "preferred_segment"),
                f"must be own, any or the host:port of a store node; there are: {known}",
            )


def tier_problems(tiers: Sequence[StorageTier]) -> Iterator[Problem]:
    """Checks the order and the kinds of tiers."""
    for index, tier in enumerate(tiers):
        before = tiers[:index]
        if isinstance(tier, LocalTier | DiskTier) and not tier.capacity:
            yield Problem(
                ("cache", "tiers", index, "capacity"), "holds nothing; leave the tier out, or give it room"
            )
        if any(isinstance(other, MooncakeTier) for other in before):
            yield Problem(
                ("cache", "tiers", index), "stands after {kind: mooncake}, which must be the last tier"
            )
        if isinstance(tier, LocalTier):
            if any(isinstance(other, DiskTier) for other in before):
                yield Problem(
                    ("cache", "tiers", index), "memory stands after a disk; the fastest tier comes first"
                )
            if any(isinstance(other, LocalTier) for other in before):
                yield Problem(("cache", "tiers", index), "is the second local tier; use only one")
        if isinstance(tier, DiskTier) and any(
            isinstance(o, DiskTier) and o.path == tier.path for o in before
        ):
            yield Problem(("cache", "tiers", index, "path"), "is already the path of another tier")
