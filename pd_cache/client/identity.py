"""EngineIdentity: what an engine says about itself to a cache server."""

from __future__ import annotations

from typing import Literal

import msgspec

import pd_cache
from pd_cache.config import CacheConfig
from pd_cache.tokens import CacheMetadata
from pd_cache.wire.messages import Hello


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Engines with equal identities share chunks, if their tensors agree, too."""

    model: str
    """Identifies the weights."""
    block_size: int
    """Tokens per block of the engine's paged cache."""
    world_size: int = 1
    """Ranks that hold a part of each chunk."""
    rank: int = 0
    shards_per_rank: int = 1
    chunk_size: int | None = None
    """Tokens per chunk; None to use the server's."""
    hash_mode: Literal["", "tokens", "blocks"] = ""
    """Whether this engine names chunks by tokens or by its own blocks' hashes; empty to use the setting in the server's file."""
    hash_seed: str = ""
    """What those hashes depend on besides tokens; empty to use the setting in the server's file."""
    namespace: str = ""
    """Fingerprint of the namespace that the server must serve; empty for any."""

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size % self.block_size:
            raise ValueError(f"chunk_size {self.chunk_size} must be a multiple of the block size {self.block_size}")

    @classmethod
    def of(cls, metadata: CacheMetadata, cache: CacheConfig) -> EngineIdentity:
        """Returns the identity of an engine's rank, whose chunks are sized and named as `cache` says."""
        return cls(
            model=metadata.model,
            block_size=metadata.block_size,
            world_size=metadata.world_size,
            rank=metadata.rank,
            shards_per_rank=metadata.shards_per_rank,
            chunk_size=cache.chunk_size,
            hash_mode=cache.named_by,
            hash_seed=cache.hash_seed,
        )

    def hello(self, client: str, kind: Literal["scheduler", "worker"]) -> Hello:
        """Returns the first message of a connection whose name is `client`."""
        return Hello(
            client,
            kind,
            pd_cache.__version__,
            self.model,
            self.world_size,
            self.rank,
            self.block_size,
            self.namespace,
            self.hash_mode,
            self.hash_seed,
            self.shards_per_rank,
        )
