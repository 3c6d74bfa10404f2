"""The settings of a cache: how chunks are named, which tiers keep them, and what a process needs to open a
cache. No files, no YAML.

`pd_cache.cluster` reads these structs from a cluster's file; a program that embeds the cache makes them
itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from transfer.settings import Bytes, Checked, Placement, Positive, TransferSettings

# `\Z`, not `$`, which also matches before a newline at the end
LineOrEmpty = Annotated[
    str,
    Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", description="text of at most one line, without control characters"),
]
AbsolutePath = Annotated[
    str, Meta(pattern=r"^/[^\x00-\x1f\x7f]*\Z", description="an absolute path, such as /var/cache/pd-cache")
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_MASTER = r"etcd://[^\s/]+(/\S+)?|([^\s:/]+|\[[0-9a-fA-F:]+\])"
_MASTERS = "an address such as 10.0.0.1:50051, or etcd://10.0.0.1:2379"
MasterAddress = Annotated[str, Meta(pattern=rf"^({_MASTER}:[1-9][0-9]{{0,4}})\Z", description=_MASTERS)]

USUAL_CHUNK = 256
"""Tokens per chunk unless the model or the user wants another size."""

MAX_SHARDS = 1024
"""The most objects into which a chunk may be cut: a lookup asks for each of them."""

EvictionName = Literal["lru", "lfu", "s3fifo"]
PromotionName = Literal["always", "second_hit", "never"]


class LocalTier(Checked, frozen=True, kw_only=True, tag_field="kind", tag="local"):
    """Memory of each process that has a cache."""

    capacity: Bytes
    """Comes on top of `transfer.staging_size`. Both are one registered memory region, so that nothing is
    copied."""
    policy: EvictionName = "lru"
    promote: PromotionName = "always"
    """When to put a chunk that was read from a later tier into this one."""


class DiskTier(Checked, frozen=True, kw_only=True, tag_field="kind", tag="disk"):
    """Files on a disk, which survive a restart."""

    path: AbsolutePath
    """An absolute folder. Processes that share it each use a folder of their own below it."""
    capacity: Bytes
    """The budget of each process."""
    policy: EvictionName = "lru"
    promote: PromotionName = "always"
    blocking: bool = False
    """Whether a store waits for the disk; otherwise the disk is written in the background."""
    direct: bool = True
    """Whether to bypass the page cache, if the file system supports that."""
    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """How many files are read at the same time, and how many are written."""
    retry_s: Seconds = 30.0
    """For how long the tier does not use a disk that failed or cannot be written."""


class MooncakeTier(Placement, frozen=True, kw_only=True, tag_field="kind", tag="mooncake"):
    """The shared pool, and where this node's chunks are put in it."""

    blocking: bool = True
    """Whether a store waits for the pool."""


StorageTier = LocalTier | DiskTier | MooncakeTier


class CacheConfig(Checked, frozen=True, kw_only=True):
    """The `cache` section: how large chunks are, how they are named, and where they are kept. Nodes that
    share hits must agree on it."""

    chunk_size: Positive | Literal["auto"] = "auto"
    """Tokens per chunk, a multiple of the engine's block size. `auto`: 256, or the next size that fits the
    model's blocks. The engine sets this size before it opens a cache."""
    hash_mode: Literal["auto", "tokens", "blocks"] = "auto"
    """Whether chunks are named by hashing tokens or by the engine's own block hashes; `auto` means blocks for
    vLLM, otherwise tokens."""
    hash_seed: LineOrEmpty = ""
    shards: Annotated[int, Meta(ge=0, le=MAX_SHARDS)] = 0
    """The number of parts into which a chunk's KV heads are cut. It must be a common multiple of the
    tensor-parallel sizes of all nodes that share chunks. 0 means the least common multiple for the nodes in
    this file."""
    tiers: Annotated[tuple[StorageTier, ...], Meta(min_length=1, max_length=8)] = (MooncakeTier(),)
    """Where chunks are kept, fastest first."""

    def fitted(self, unit: int) -> CacheConfig:
        """Returns this section with a size for `chunk_size: auto`: at least 256 tokens, and a multiple of
        `unit`."""
        if self.chunk_size != "auto":
            return self
        return replace(self, chunk_size=-(-USUAL_CHUNK // unit) * unit)

    @property
    def pool(self) -> MooncakeTier:
        """The pool's tier. If there is none, a tier with the defaults."""
        return next((tier for tier in self.tiers if isinstance(tier, MooncakeTier)), MooncakeTier())

    @property
    def chunk_tokens(self) -> int:
        """`chunk_size`, with `auto` resolved to 256."""
        return USUAL_CHUNK if self.chunk_size == "auto" else self.chunk_size

    @property
    def named_by(self) -> Literal["tokens", "blocks"]:
        """`hash_mode`, with `auto` resolved to tokens: an engine that has block hashes sets the mode
        beforehand."""
        return "blocks" if self.hash_mode == "blocks" else "tokens"


class NodeSettings(Checked, frozen=True, kw_only=True):
    """Everything that the cache inside a process needs to know: a node's view of the file, or the settings of
    an embedding program."""

    master: Annotated[str, Meta(pattern=rf"^({_MASTER}:[0-9]{{1,5}}|)\Z", description=_MASTERS)]
    """`host:port` of Mooncake's master, or `etcd://host:port` of elected ones; empty if this process uses no
    pool."""
    host: str = "127.0.0.1"
    cache: CacheConfig = CacheConfig()
    transfer: TransferSettings = TransferSettings()
    segment_size: Bytes = 0


class TracingConfig(Checked, frozen=True, kw_only=True):
    """Where the spans of requests go (`pd_cache/tracing.py`)."""

    endpoint: (
        Annotated[
            str,
            Meta(
                pattern=r"^https?://[^\x00-\x20\x7f]+\Z",
                max_length=300,
                description="the URL of a collector of OpenTelemetry, for OTLP over HTTP: http://10.0.0.9:4318/v1/traces",
            ),
        ]
        | None
    ) = None
    """The collector's address; None for no spans."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The share of the requests without a `traceparent` that are traced. For other requests, their
    `traceparent` decides."""


class ServerSettings(Checked, frozen=True, kw_only=True):
    """A cache server's threads, and how long it protects chunks."""

    threads: Annotated[int, Meta(ge=2, le=64)] = 3
    """Threads that serve engines: one thread answers lookups, the others move bytes."""
    session_s: Seconds = 60.0
    """How long a lookup protects the chunks that it found from eviction if nothing loads them."""
