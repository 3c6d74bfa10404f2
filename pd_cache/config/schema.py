"""The schema of the one YAML file that describes a cluster: every key, its type, its default and its bounds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from transfer.settings import ByteSize, Positive, TransferSettings

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mapping of the file in which only the declared keys may stand."""


# --- cache -----------------------------------------------------------------------------------------------------------


class MooncakeTier(_Section, frozen=True, kw_only=True, tag_field="kind", tag="mooncake"):
    """The shared pool."""


class CacheConfig(_Section, frozen=True, kw_only=True):
    """The `cache` section: what a chunk is, and where chunks live. All nodes that shall share hits must agree on it."""

    chunk_size: Positive = 256
    """Tokens a chunk; a multiple of the engine's block size."""
    hash_mode: Literal["tokens", "blocks"] = "tokens"
    """Name chunks by hashing tokens, or by the engine's own block hashes."""
    hash_seed: str = ""
    tiers: Annotated[tuple[MooncakeTier, ...], msgspec.Meta(min_length=1, max_length=1)] = (MooncakeTier(),)
    """Where chunks live."""


# --- engines ---------------------------------------------------------------------------------------------------------


class RandomModel(_Section, frozen=True, kw_only=True):
    """A Llama with seeded random weights: same numbers, same tokens, on every node. Nothing is downloaded."""

    seed: int = 0
    vocab_size: Positive = 4096
    hidden_size: Positive = 256
    intermediate_size: Positive = 688
    layers: Positive = 4
    heads: Positive = 8
    kv_heads: Positive = 4

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads} must divide hidden_size {self.hidden_size} and be a multiple of "
                f"kv_heads {self.kv_heads}"
            )


class ModelConfig(_Section, frozen=True, kw_only=True):
    """Which model to serve: a local Hugging Face folder, or a random one."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """What clients write into `model`."""
    path: str | None = None
    random: RandomModel | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.random is None):
            raise ValueError("exactly one of `path` (a local folder) and `random` must be given")


class ReferenceEngineConfig(_Section, frozen=True, kw_only=True, tag_field="kind", tag="reference"):
    """The small engine that ships with pd-cache: for trying out, testing and measuring, not for production."""

    model: ModelConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: Positive = 16
    """Tokens a block of the paged cache."""
    num_blocks: Positive = 2048
    max_model_len: Positive = 8192
    """Longest prompt plus output, in tokens."""
    max_running: Positive = 8
    """Requests that compute at the same time."""
    max_queue: Positive = 64
    """Requests that wait; one more is answered 503 with Retry-After."""
    step_tokens: Positive = 256
    """Prompt tokens computed in one step."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Compute threads; 0 leaves it to torch."""


EngineConfig = ReferenceEngineConfig


# --- nodes -----------------------------------------------------------------------------------------------------------


class _Node(_Section, frozen=True, kw_only=True, tag_field="role"):
    name: Name
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """The address that the other nodes reach this one at; also what it binds."""

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class MasterNode(_Node, frozen=True, kw_only=True, tag="master"):
    """Mooncake's master: which key lies where, leases and eviction. Its flags are set explicitly."""

    port: Port = 50051
    metrics_port: Port = 9003
    lease_ttl_ms: Annotated[int, msgspec.Meta(ge=100)] = 10_000
    """How long a key that somebody looked up is safe from eviction; at least 3 times the slowest batch."""
    client_ttl_s: Positive = 5
    """After how many silent seconds a node's segment counts as gone."""
    put_discard_timeout_s: Positive = 5
    """After how many seconds the put of a writer that died no longer blocks the key."""
    eviction_high_watermark: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    eviction_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1


class StoreNode(_Node, frozen=True, kw_only=True, tag="store"):
    """A node that only gives memory to the pool."""

    segment_size: ByteSize


class EngineNode(_Node, frozen=True, kw_only=True):
    port: Port = 0
    segment_size: ByteSize | None = None
    """Memory that this node gives to the pool; `transfer.segment_size` where it is not set."""


class PrefillNode(EngineNode, frozen=True, kw_only=True, tag="prefill"):
    """Computes prompts, stores their chunks, and reuses what the pool holds."""


class DecodeNode(EngineNode, frozen=True, kw_only=True, tag="decode"):
    """Takes prompts' chunks from the pool, computes the rest and streams the output."""


class ProxyNode(_Node, frozen=True, kw_only=True, tag="proxy"):
    """Where clients post their requests."""

    port: Port = 8000


Node = MasterNode | StoreNode | PrefillNode | DecodeNode | ProxyNode
ROLES = ("master", "store", "prefill", "decode", "proxy")
"""In the order in which `up` starts them; it stops them in reverse."""


# --- discovery -------------------------------------------------------------------------------------------------------

Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]


class StaticDiscovery(_Section, frozen=True, kw_only=True, tag_field="kind", tag="static"):
    """The nodes are those of the file."""


class TlsConfig(_Section, frozen=True, kw_only=True):
    """How to talk to etcd over TLS. Files in PEM format, on every machine."""

    ca_file: Annotated[str, msgspec.Meta(min_length=1)]
    """Who must have signed etcd's certificate."""
    cert_file: str | None = None
    """Our own certificate, where etcd asks for one."""
    key_file: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("`cert_file` and `key_file` go together")


class EtcdDiscovery(_Section, frozen=True, kw_only=True, tag_field="kind", tag="etcd"):
    """Nodes register in etcd and find one another there; the file need not name them all."""

    endpoints: Annotated[tuple[Endpoint, ...], msgspec.Meta(min_length=1, max_length=16)]
    """`host:port` of etcd's members."""
    ttl_s: Annotated[int, msgspec.Meta(ge=2, le=3600)] = 5
    """A node that was not heard of for so long is gone. etcd's own least is 2."""
    timeout_s: Seconds = 2.0
    """The longest that one call to etcd may take; never more than a third of `ttl_s`."""
    user: str | None = None
    password_file: str | None = None
    """A file that holds the user's password and nothing else."""
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password_file is None):
            raise ValueError("`user` and `password_file` go together")


DiscoveryConfig = StaticDiscovery | EtcdDiscovery


class MastersConfig(_Section, frozen=True, kw_only=True):
    """The `master` section: what holds for all nodes of the role master."""

    ha: bool = False
    """Several masters: etcd elects one, which shares its log of operations with the others; clients follow it."""


class ProxyConfig(_Section, frozen=True, kw_only=True):
    """The `proxy` section."""

    request_timeout_s: Seconds = 300.0
    """From a request's arrival to its last byte."""
    prefill_timeout_s: Seconds = 120.0
    """After this the decode node computes the prompt itself."""
    connect_timeout_s: Seconds = 2.0
    max_requests: Positive = 1024
    """Requests in flight; one more is answered 503 with Retry-After."""
    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """Which prefill node computes a prompt; see `launch/proxy/routing.py`."""
    direct_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """A prompt of which fewer tokens are to be computed goes to the decode node directly; None: `cache.chunk_size`."""
    node_cache_tokens: Positive = 1_000_000
    """Tokens that a prefill node's own cache holds, where the node does not say."""
    breaker_failures: Positive = 5
    """A node that fails so many requests in a row is skipped for a while; one that cannot be connected to is at once."""
    health_interval_s: Seconds = 2.0
    health_timeout_s: Seconds = 2.0
    api_keys_file: str | None = None
    """Lines of `NAME KEY`; clients then need one of these keys. Read at the start."""
    max_requests_per_key: Positive | None = None
    """Requests in flight of one key; one more is answered 429 with Retry-After."""
    drain_s: Seconds = 5.0
    """How long requests in flight may go on when the proxy is told to stop."""

    def __post_init__(self) -> None:
        if self.max_requests_per_key is not None and self.api_keys_file is None:
            raise ValueError("`max_requests_per_key` needs `api_keys_file`")


class HandoffConfig(_Section, frozen=True, kw_only=True):
    """The `handoff` section: how a decode node takes over a prompt."""

    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 2_000
    """How long a decode node waits for a prefix that the prefill node announced."""


class SupervisorConfig(_Section, frozen=True, kw_only=True):
    """The `supervisor` section: `up` and the processes that it starts."""

    ready_timeout_s: Seconds = 120.0
    stop_grace_s: Seconds = 10.0


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    name: Name = "pd-cache"
    transfer: TransferSettings = TransferSettings()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig | None = None
    """Needed where there are prefill or decode nodes."""
    handoff: HandoffConfig = HandoffConfig()
    proxy: ProxyConfig = ProxyConfig()
    discovery: DiscoveryConfig = StaticDiscovery()
    masters: MastersConfig = msgspec.field(name="master", default=MastersConfig())
    supervisor: SupervisorConfig = SupervisorConfig()
    nodes: Annotated[tuple[Node, ...], msgspec.Meta(min_length=1)]

    @property
    def master(self) -> MasterNode:
        return next(node for node in self.nodes if isinstance(node, MasterNode))

    @property
    def master_address(self) -> str:
        """What Mooncake's clients are given: `host:port`, or where the elected master is found."""
        if self.masters.ha and isinstance(self.discovery, EtcdDiscovery):
            return f"etcd://{';'.join(self.discovery.endpoints)}/{self.name}"
        return f"{self.master.host}:{self.master.port}"

    def segment_size(self, node: Node) -> int:
        """Bytes of memory that a node gives to the pool."""
        own = getattr(node, "segment_size", None)
        return int(self.transfer.segment_size if own is None else own)

    def node(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    def by_role(self, role: str) -> list[Node]:
        return [node for node in self.nodes if node.role == role]


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache inside one process needs to know: a node's view of the file, or an embedding program's own."""

    master: str
    """`host:port` of Mooncake's master."""
    host: str = "127.0.0.1"
    cache: CacheConfig = CacheConfig()
    transfer: TransferSettings = TransferSettings()
    segment_size: int = 0

    @classmethod
    def of(cls, config: ClusterConfig, node: Node) -> NodeSettings:
        """The settings of one node of the file."""
        return cls(
            master=config.master_address,
            host=node.host,
            cache=config.cache,
            transfer=config.transfer,
            segment_size=config.segment_size(node),
        )
