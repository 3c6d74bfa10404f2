"""The schema of the YAML file that describes a cluster: every key, its type, its default and its bounds."""

from __future__ import annotations

import math
import zlib
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from pd_cache.config import (
    CacheConfig,
    LineOrEmpty,
    NodeSettings,
    Seconds,
    ServerSettings,
    TracingConfig,
)
from pd_cache.runtime import runtime_folder
from transfer.settings import Bytes, ByteSize, Checked, Positive, TransferSettings

# `\Z`, not `$`, which also matches before a newline at the end
Port = Annotated[int, Meta(ge=0, le=65535)]
Line = Annotated[
    str, Meta(pattern=r"^[^\x00-\x1f\x7f]+\Z", description="text of one line, without control characters")
]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z",
        description="1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first",
    ),
]
PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
HOST = rf"({_OCTET}(\.{_OCTET}){{3}}|({_LABEL}\.)*(?![0-9]+(?![A-Za-z0-9_-])){_LABEL})"
"""The pattern of an IPv4 address, or of a name: labels of at most 63 characters, as in DNS. The last label is
no number."""
Origin = Annotated[
    str,
    Meta(
        pattern=r"^(\*|https?://[^/\x00-\x20\x7f-\U0010ffff]+)\Z",
        description="* or the origin of web pages: http:// or https://, a host and its port, and no path",
    ),
]
ServerUrl = Annotated[
    str,
    Meta(
        pattern=r"^(ipc:///[^\x00-\x1f\x7f]+)?\Z",
        description="ipc:///ABSOLUTE/PATH",
    ),
]
FlagName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9_.-]*\Z",
        description="the name of a flag of `vllm serve` without the dashes",
    ),
]
VariableName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z",
        description="the name of a variable: letters, digits and underscores",
    ),
]
LOOPBACK = ("127.0.0.1", "localhost")
Host = Annotated[
    str,
    Meta(
        pattern=rf"^{HOST}\Z",
        max_length=253,
        description="a host name or an IPv4 address, without scheme and port",
    ),
]
TtlS = Annotated[int, Meta(ge=1, le=86_400)]

LARGEST_BODY = 16 << 20
"""The most bytes of a request to the proxy. A prompt of a million token ids fits."""


# --- engines ------------------------------------------------------------------------------------------------


class RandomModel(Checked, frozen=True, kw_only=True):
    """A Llama with seeded random weights, so that every node has the same weights and outputs. Nothing is
    downloaded."""

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    vocab_size: Positive = 4096
    hidden_size: Positive = 256
    intermediate_size: Positive = 688
    layers: Positive = 4
    heads: Positive = 8
    kv_heads: Positive = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads} must divide hidden_size {self.hidden_size} and be a multiple of "
                f"kv_heads {self.kv_heads}"
            )


class ModelConfig(Checked, frozen=True, kw_only=True):
    """The model to serve."""

    name: Line
    """What clients write into `model`."""
    random: RandomModel = RandomModel()


class ReferenceEngineConfig(Checked, frozen=True, kw_only=True, tag_field="kind", tag="reference"):
    """The small engine that ships with pd-cache: for trying out, testing and measuring, not for
    production."""

    model: ModelConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: Positive = 16
    """How many tokens a block of the paged cache has."""
    num_blocks: Positive = 2048
    max_model_len: Positive = 8192
    """The longest prompt plus output, in tokens."""
    max_running: Positive = 8
    """The most requests that compute at the same time."""
    max_queue: Positive = 64
    """The most requests that wait. The answer to one more is 503 with Retry-After."""
    step_tokens: Positive = 256
    """The most prompt tokens computed in one step."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """How many threads compute; with 0, torch decides."""


Argument = bool | int | float | str | list[int | float | str]
Arguments = dict[FlagName, Argument]
"""Flags of `vllm serve` without the dashes, such as `max-model-len: 8192`. True is the bare flag, false its
`--no-` form."""


Environment = dict[VariableName, str]


class VllmEngineConfig(Checked, frozen=True, kw_only=True, tag_field="kind", tag="vllm"):
    """vLLM: prefill and decode nodes run `vllm serve` with pd-cache's connector."""

    model: Line
    """A model folder, or a name that vLLM finds in its cache."""
    name: Line | None = None
    """What clients write into `model`; by default `model`."""
    args: Arguments = msgspec.field(default_factory=dict)
    env: Environment = msgspec.field(default_factory=dict)
    executable: Line = "vllm"
    """A path, or the name of a program beside this Python or in PATH."""

    @property
    def block_size(self) -> int | None:
        """The tokens per block, if the file sets them; None if vLLM chooses."""
        value = argument(self.args, "block-size")
        return value if isinstance(value, int) else None


def argument(args: Arguments, name: str) -> Argument | None:
    """Returns an argument of `vllm serve`, whether its name is spelled with dashes or underscores; None if it
    is not set."""
    return next((value for key, value in args.items() if key.replace("_", "-") == name), None)


SECRET_VARIABLES = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
"""Secret arguments of `vllm serve`, and the variables from which vLLM reads them. Every user of a machine can
read the arguments of its processes; only the owner of a process can read its environment."""


COUNTS = frozenset((
    "block-size", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "data-parallel-size-local", "data-parallel-rank",
    "data-parallel-start-rank",
))  # fmt: skip
"""Arguments of `vllm serve` on whose numbers pd-cache relies."""


EngineConfig = ReferenceEngineConfig | VllmEngineConfig


class ConnectorConfig(Checked, frozen=True, kw_only=True):
    """The `connector` section: pd-cache inside vLLM."""

    load: Literal["auto", "always", "never"] = "auto"
    """Which prefixes to load. `auto`: those that earlier loads and steps show to be probably faster to load
    than to compute; a hand-off may take twice as long."""
    lookup_timeout_ms: Annotated[int, Meta(ge=1, le=10_000)] = 50
    """How long a lookup may delay the scheduler."""
    recompute: Literal["token", "block"] = "token"
    """What vLLM computes if the pool has all of a prompt. `token`: the last token. `block`: as much as after
    a hit in vLLM's own prefix cache, so that the results are the same, bit for bit."""
    load_timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] = 10_000
    """How long a load may take. After that, the request computes what was not loaded."""
    store_queue: Positive = 256
    """The most chunks that wait to be stored or are being stored. Their blocks are kept until their end.
    Further chunks are counted and not stored."""
    store_generated: bool = False
    """Whether to store generated tokens as well as prompts."""
    trust_media_ids: bool = False
    """Whether the names that clients give to images, audio and video (`uuid`) are unique among all clients,
    and change with the content. If not, a prompt with media is stored and found only if it has a
    `cache_salt`, or comes through a proxy, because the proxy removes these names."""
    revision: LineOrEmpty = ""
    """Identifies the weights in place of the digest of their files, for models that are not in files."""


# --- nodes --------------------------------------------------------------------------------------------------


class _Role:
    """Takes a node's role from the tag of its struct."""

    __slots__ = ()
    __struct_config__: ClassVar[msgspec.structs.StructConfig]

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def ports(self) -> dict[str, int]:
        """The node's ports in the file, by key; 0 is chosen later."""
        keys = ("port", "metrics_port", "picker_port")
        return {key: port for key in keys if (port := getattr(self, key, None)) is not None}


class _AnyNode(Checked, _Role, frozen=True, kw_only=True, tag_field="role"):
    name: Name
    host: Host = "127.0.0.1"
    """The address that it binds, and at which other nodes reach it; so it is never 0.0.0.0."""


class MasterNode(_AnyNode, frozen=True, kw_only=True, tag="master"):
    """Mooncake's master, which knows where each key lies, and does leases and eviction. pd-cache sets its
    flags explicitly."""

    port: Port = 50051
    metrics_port: Port = 9003
    lease_ttl_ms: Annotated[int, Meta(ge=100, le=86_400_000)] = 10_000
    """How long a key that was looked up is safe from eviction: at least `get_ms` and `put_ms`."""
    client_ttl_s: TtlS = 5
    """The seconds of silence after which a node's segment counts as gone."""
    eviction_high_watermark: Annotated[float, Meta(gt=0, le=1)] = 0.9
    eviction_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.1


class StoreNode(_AnyNode, frozen=True, kw_only=True, tag="store"):
    """A node that only gives memory to the pool."""

    segment_size: Bytes
    port: Port = 0
    """Its segment is named `host:port`. Nothing listens there."""
    metrics_port: Port | None = None
    """The port at which the node answers `/health` and `/metrics`; None if it does not answer."""


class EngineNode(_AnyNode, frozen=True, kw_only=True):
    port: Port = 0
    cache_server: Name | None = None
    """The cache-server node, on the same host, that holds this engine's cache. Without one, the engine has
    its own cache."""
    segment_size: Bytes | None = None
    """The memory that this node gives to the pool; by default `transfer.segment_size`."""
    args: Arguments = msgspec.field(default_factory=dict)
    """vLLM: flags of this node alone. They override `engine.args`."""
    env: Environment = msgspec.field(default_factory=dict)
    """vLLM: variables of this node alone, e.g. CUDA_VISIBLE_DEVICES. They override `engine.env`."""
    events_port: Port = 0
    """vLLM: the port at which it publishes which blocks its own cache stores and removes. Each data-parallel
    rank has a port, from this port on; as many further ports serve replays. 0 publishes nothing. The proxy
    follows these events."""


class PrefillNode(EngineNode, frozen=True, kw_only=True, tag="prefill"):
    """Computes prompts, stores their chunks, and reuses what the pool holds."""


class DecodeNode(EngineNode, frozen=True, kw_only=True, tag="decode"):
    """Takes prompts' chunks from the pool, computes the rest and streams the output."""


class BothNode(EngineNode, frozen=True, kw_only=True, tag="both"):
    """Prefills and decodes; see `proxy.roles`."""


class CacheServerNode(ServerSettings, _Role, frozen=True, kw_only=True, tag_field="role", tag="cache-server"):
    """Owns the cache of a host (the pool's client, staging memory and local tiers) for the engines of this
    host that name it."""

    name: Name
    host: Host = "127.0.0.1"
    """The same as for every node."""
    url: ServerUrl = ""
    """The address at which engines reach it. Empty: a socket in the user's runtime folder, named after the
    cluster."""
    metrics_port: Port = 0
    segment_size: Bytes | None = None
    """The memory that this node gives to the pool; by default `transfer.segment_size`."""


class ProxyNode(_AnyNode, frozen=True, kw_only=True, tag="proxy"):
    """Takes clients' requests and routes them to prefill and decode nodes."""

    port: Port = 8000
    picker_port: Port | None = None
    """The port at which gateways ask for decode nodes, over Envoy's external processing (docs/recipes.md);
    None if no gateway asks."""


def tensor_parallel(engine: VllmEngineConfig, node: EngineNode) -> int:
    """Returns the tensor-parallel size of a node that runs vLLM."""
    return _number(engine, node, "tensor-parallel-size") or 1


def data_parallel(engine: EngineConfig | None, node: EngineNode) -> tuple[int, range]:
    """Returns the data-parallel size of a node, and the ranks that run on its host."""
    if not isinstance(engine, VllmEngineConfig):
        return 1, range(1)
    size = _number(engine, node, "data-parallel-size") or 1
    if (rank := _number(engine, node, "data-parallel-rank")) is not None:
        return size, range(rank, rank + 1)
    first, local = (_number(engine, node, f"data-parallel-{name}") for name in ("start-rank", "size-local"))
    first = first or 0
    return size, range(first, min(size, size if local is None else first + local))


def _number(engine: VllmEngineConfig, node: EngineNode, name: str) -> int | None:
    """Returns a number among the arguments of `vllm serve`; None if it is not set."""
    found = (argument(args, name) for args in (node.args, engine.args))
    return next((value for value in found if type(value) is int and value >= 0), None)


Node = MasterNode | StoreNode | CacheServerNode | PrefillNode | DecodeNode | BothNode | ProxyNode
ENGINES = ("prefill", "decode", "both")
ROLES = ("master", "store", "cache-server", *ENGINES, "proxy")
"""The roles in the order in which `up` starts them. It stops them in reverse order."""


# --- discovery ----------------------------------------------------------------------------------------------

Endpoint = Annotated[
    str,
    Meta(
        pattern=rf"^(\[[0-9A-Fa-f:]+\]|{HOST}):{PORT}\Z",
        description="`host:port` without a scheme, e.g. 10.0.0.1:2379",
    ),
]


class StaticDiscovery(Checked, frozen=True, kw_only=True, tag_field="kind", tag="static"):
    """The cluster has exactly the nodes of the file."""


class TlsConfig(Checked, frozen=True, kw_only=True):
    """TLS to etcd. The files are in PEM format, on every machine."""

    ca_file: Line
    """The certificate of the authority that must have signed etcd's certificate."""
    cert_file: Line | None = None
    """Our own certificate, if etcd asks for one."""
    key_file: Line | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("`cert_file` and `key_file` go together")


class EtcdDiscovery(Checked, frozen=True, kw_only=True, tag_field="kind", tag="etcd"):
    """Nodes register in etcd and find one another there. The file need not name them all."""

    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=16)]
    """`host:port` of etcd's members."""
    ttl_s: Annotated[int, Meta(ge=2, le=3600)] = 5
    """The seconds of silence after which a node counts as gone. etcd allows no less than 2."""
    user: Line | None = None
    password_file: Line | None = None
    """A file that holds the user's password and nothing else."""
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.user is None) != (self.password_file is None):
            raise ValueError("`user` and `password_file` go together")


DiscoveryConfig = StaticDiscovery | EtcdDiscovery


class MastersConfig(Checked, frozen=True, kw_only=True):
    """The `master` section: settings of all nodes of the role master."""

    ha: bool = False
    """Whether there are several masters. etcd elects one master, which shares its log of operations with the
    others. Clients follow it."""


class ServerTlsConfig(Checked, frozen=True, kw_only=True):
    """TLS from clients to the proxy. The files are in PEM format. They are read again when they change."""

    cert_file: Annotated[str, Meta(min_length=1)]
    """The proxy's certificate, then the intermediate ones up to an authority that clients trust."""
    key_file: Annotated[str, Meta(min_length=1)]
    """The certificate's private key, without a pass phrase."""


class HintsConfig(Checked, frozen=True, kw_only=True):
    """The `proxy.hints` section: how much clients may keep in the pool (`kv.retain`)."""

    max_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.25
    """The share of the pool's memory that the pins of all proxies together may take. 0 refuses all hints."""
    max_ttl_s: Seconds = 3600.0
    """The longest time for which a prompt is kept until it is retained again."""
    max_pins: Positive = 1000
    """The most pins of one proxy."""


class RolesConfig(Checked, frozen=True, kw_only=True):
    """The `proxy.roles` section: what nodes of the role `both` do."""

    auto: bool = False
    """Whether the proxy lets each of these nodes either prefill or decode, depending on the load
    (`launch/proxy/routing/roles.py`). Otherwise they do both at all times."""
    min_prefill: Positive = 1
    """The fewest nodes that prefill while enough are alive, those of the role `prefill` included."""
    min_decode: Positive = 1


class LimitsConfig(Checked, frozen=True, kw_only=True):
    """The `proxy.limits` section: completions that would probably take longer are refused; None for no
    limit."""

    ttft_s: Seconds | None = None
    """The time from a completion's arrival to its first token."""
    token_s: Seconds | None = None
    """The average time between two tokens."""
    over: Literal["refuse", "best_effort"] = "refuse"
    """Whether a completion that would take longer gets a 429, or waits until others have left room for it."""


class TenantConfig(Checked, frozen=True, kw_only=True):
    """The limits of a tenant; None for no limit. Each of several proxies grants an equal part of `pins`."""

    pins: Bytes | None = None
    """How much of the pool its pins may keep."""
    max_requests: Positive | None = None
    """The most requests in flight at a proxy. The answer to one more is 429 with Retry-After."""
    limits: LimitsConfig | None = None
    """Replaces `proxy.limits` for the tenant."""


class TenantsFile(Checked, frozen=True, kw_only=True):
    """The file that `proxy.tenants_file` names."""

    tenants: Annotated[dict[Name, TenantConfig], Meta(max_length=1000)]
    keys: dict[Name, LimitsConfig] = msgspec.field(default_factory=dict)
    """The limits of single keys, by their names. They replace those of the tenant and `proxy.limits`."""


class ProxyConfig(Checked, frozen=True, kw_only=True):
    """The `proxy` section."""

    request_timeout_s: Seconds = 300.0
    """How long a request may take, from its arrival to the last byte of its answer."""
    prefill_timeout_s: Seconds = 120.0
    """How long a prefill may take. After that, the decode node computes the prompt itself."""
    max_requests: Positive = 1024
    """The most requests in flight. The answer to one more is 503 with Retry-After. Each request takes up to
    four file descriptors."""
    body_memory: Bytes = ByteSize(512 << 20)
    """The memory of all requests' bodies together. A body takes twice its size, from its first byte until the
    decode node's answer begins. A quarter of the memory is reserved for bodies of at most 256KiB. At least
    48MiB are needed, so that the largest body fits."""
    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """How the proxy chooses among nodes; see `launch/proxy/routing/node_pool.py`."""
    direct_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """A prompt with fewer tokens than this left to compute goes directly to the decode node. None means
    `cache.chunk_size`."""
    index_blocks: Positive = 4_000_000
    """The most blocks that the proxy knows from KV events, of all nodes together. Each takes about 100 bytes
    of memory."""
    load_bytes: Bytes = ByteSize(1 << 20)
    """How many bytes a prefill node loads from the pool in the time in which it computes one token of a
    prompt."""
    hints: HintsConfig = HintsConfig()
    roles: RolesConfig = RolesConfig()
    limits: LimitsConfig = LimitsConfig()
    api_keys_file: Line | None = None
    """A file with lines of `NAME KEY` or `NAME KEY TENANT`. If it is given, clients need one of these keys.
    It is read again when it changes."""
    tenants_file: Line | None = None
    """A YAML file with `tenants: {NAME: {pins, max_requests, limits}}` and `keys: {NAME: {ttft_s, token_s,
    over}}`. Tenants that it does not name are refused. Read again when it changes."""
    monitor_keys_file: Line | None = None
    """A file with lines of `NAME KEY`, for `/metrics` and all of `/health`. None: clients' keys open
    these."""
    node_key_file: Line | None = None
    """A file with the nodes' key (vLLM's `--api-key`), which the proxy sends in place of the client's. It is
    read again when it changes."""
    tls: ServerTlsConfig | None = None
    """The proxy's certificate and key; None for plain HTTP."""
    gateway: Literal["envoy"] | None = None
    """`envoy`: Envoy takes the requests and passes on the answers, and asks the proxy for decode nodes; see
    docs/recipes.md. Needs the extra `gateway`. None: the proxy does that itself."""
    cors_origins: tuple[Origin, ...] = ()
    """The origins whose web pages may ask the proxy from a browser; `*` for all."""
    max_requests_per_key: Positive | None = None
    """The most requests in flight of a key. The answer to one more is 429 with Retry-After."""
    drain_s: Seconds = 5.0
    """How long requests in flight may go on after the proxy is stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_requests_per_key is not None and self.api_keys_file is None:
            raise ValueError("`max_requests_per_key` needs `api_keys_file`")
        if self.tenants_file is not None and self.api_keys_file is None:
            raise ValueError("`tenants_file` needs `api_keys_file`, which names the tenant of each key")
        if self.node_key_file is not None and self.api_keys_file is None:
            raise ValueError(
                "`node_key_file` needs `api_keys_file`; without it every client could use the nodes' key"
            )
        if self.body_memory < 3 * LARGEST_BODY:
            raise ValueError(
                f"`body_memory` must be at least {ByteSize(3 * LARGEST_BODY)}, three times the largest body"
            )


class HandoffConfig(Checked, frozen=True, kw_only=True):
    """The `handoff` section: how a decode node takes over a prompt."""

    wait_ms: Annotated[int, Meta(ge=0, le=600_000)] = 2_000
    """How long a decode node waits for a prefix that the prefill node announced."""
    stream: Literal["auto", "always", "never"] = "auto"
    """Whether a decode node loads a prompt's chunks while the prefill node computes others: for long prompts,
    for all, or for none. Only decode nodes that report that they can do it get such requests."""


class SupervisorConfig(Checked, frozen=True, kw_only=True):
    """The `supervisor` section: `up` and the processes that it starts."""

    ready_timeout_s: Seconds = 120.0
    stop_grace_s: Seconds = 10.0


class ClusterConfig(Checked, frozen=True, kw_only=True):
    """The whole file."""

    name: Name = "pd-cache"
    transfer: TransferSettings = TransferSettings()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig | None = None
    """Needed if there are nodes of the role prefill, decode or both."""
    connector: ConnectorConfig = ConnectorConfig()
    handoff: HandoffConfig = HandoffConfig()
    proxy: ProxyConfig = ProxyConfig()
    discovery: DiscoveryConfig = StaticDiscovery()
    masters: MastersConfig = msgspec.field(name="master", default=MastersConfig())
    supervisor: SupervisorConfig = SupervisorConfig()
    tracing: TracingConfig = TracingConfig()
    nodes: Annotated[tuple[Node, ...], Meta(min_length=1)]

    @property
    def master(self) -> MasterNode:
        return next(node for node in self.nodes if isinstance(node, MasterNode))

    @property
    def master_address(self) -> str:
        """The master's address for Mooncake's clients: `host:port`, or the etcd that holds the elected
        master's address."""
        if self.masters.ha and isinstance(self.discovery, EtcdDiscovery):
            return f"etcd://{';'.join(self.discovery.endpoints)}/{self.name}"
        return f"{self.master.host}:{self.master.port}"

    @property
    def lease_ttl_ms(self) -> int:
        """How long a key that was looked up is safe: the shortest lease of the file's masters."""
        masters = [node for node in self.nodes if isinstance(node, MasterNode)]
        return min(node.lease_ttl_ms for node in masters or [MasterNode(name="default")])

    def segment_size(self, node: Node | EngineNode) -> int:
        """Returns how many bytes of memory a node gives to the pool."""
        if not isinstance(node, StoreNode) and node not in self.caching_nodes():
            return 0
        own = getattr(node, "segment_size", None)
        return int(self.transfer.segment_size if own is None else own)

    def server_url(self, node: CacheServerNode) -> str:
        """Returns the address at which a cache server listens. Without etcd, the master's port must be chosen
        by then.

        The address holds a digest of etcd's addresses or the master's port, so that two clusters of one name
        differ.
        """
        if node.url:
            return node.url
        if isinstance(self.discovery, EtcdDiscovery):  # a master may come back on another port
            cluster = f"{zlib.crc32(','.join(sorted(self.discovery.endpoints)).encode()):08x}"
        else:
            cluster = str(self.master.port)
        return f"ipc://{runtime_folder()}/{self.name}-{cluster}-{node.name}.sock"

    def event_addresses(self, node: EngineNode, rank: int = 0) -> tuple[str, str]:
        """Returns where a data-parallel rank of a node publishes its KV events, and where it sends them
        again. The node has an `events_port`.

        vLLM binds a TCP port on all addresses. So a node at a loopback address uses sockets in the user's
        runtime folder instead. vLLM derives a rank's addresses from the given ones: it adds the rank to the
        port, or adds `_dpRANK` to an address that contains "inproc".
        """
        port = node.events_port
        if node.host in LOOPBACK:
            # the path of a socket has at most 107 bytes
            digest = zlib.crc32(f"{self.name}/{node.name}".encode())
            stream, suffix = (
                f"ipc://{runtime_folder()}/inproc-{digest:08x}-{port}",
                f"_dp{rank}" if rank else "",
            )
            return f"{stream}{suffix}", f"{stream}.replay{suffix}"
        size, _ = data_parallel(self.engine, node)
        return f"tcp://{node.host}:{port + rank}", f"tcp://{node.host}:{port + size + rank}"

    def caching_nodes(self) -> list[EngineNode | CacheServerNode]:
        """Returns the nodes that own a cache and a client of the pool. An engine that names a cache server
        owns neither."""
        return [
            node
            for node in self.nodes
            if isinstance(node, CacheServerNode)
            or (isinstance(node, EngineNode) and node.cache_server is None)
        ]

    def node(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    @property
    def shards(self) -> int:
        """The number of parts into which the nodes of this file cut a chunk's KV heads."""
        if self.cache.shards or not isinstance(self.engine, VllmEngineConfig):
            return self.cache.shards or 1
        return math.lcm(
            *(tensor_parallel(self.engine, node) for node in self.nodes if isinstance(node, EngineNode))
        )

    def by_role(self, *roles: str) -> list[Node]:
        return [node for node in self.nodes if node.role in roles]

    def settings_of(self, node: Node | EngineNode) -> NodeSettings:
        """Returns the settings of the cache inside a node of the file."""
        engine = self.engine
        return NodeSettings(
            master=self.master_address,
            host=node.host,
            cache=self.cache.fitted(engine.block_size)
            if isinstance(engine, ReferenceEngineConfig)
            else self.cache,
            transfer=self.transfer,
            segment_size=self.segment_size(node),
        )
