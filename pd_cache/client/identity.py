"""EngineIdentity: what an engine says about itself to a cache server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

import pd_cache
from pd_cache.config import CacheConfig
from pd_cache.tokens import CacheMetadata, LayerGroup
from pd_cache.wire.messages import FurtherLayers, Hello


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
    layers: LayerGroup | None = None
    """Which of the model's layers; None if all are kept alike."""
    further: tuple[FurtherLayers, ...] = ()
    """The other groups of layers that lookups ask for."""
    object_sizes: tuple[int, ...] = ()
    """The payload bytes of a chunk's object in each group of layers of this worker; those of similar size share the server's memory."""

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size % self.block_size:
            raise ValueError(f"chunk_size {self.chunk_size} must be a multiple of the block size {self.block_size}")

    @classmethod
    def of(cls, metadata: CacheMetadata, cache: CacheConfig, further: Sequence[CacheMetadata] = ()) -> EngineIdentity:
        """Returns the identity of an engine's rank, whose chunks are sized and named as `cache` says. `further` are its other groups of
        layers, for lookups."""
        return cls(
            model=metadata.model,
            block_size=metadata.block_size,
            world_size=metadata.world_size,
            rank=metadata.rank,
            shards_per_rank=metadata.shards_per_rank,
            chunk_size=cache.chunk_tokens,
            hash_mode=cache.named_by,
            hash_seed=cache.hash_seed,
            layers=metadata.group,
            further=tuple(
                FurtherLayers(one.group, one.block_size, one.world_size, one.shards_per_rank)
                for one in further
                if one.group is not None
            ),
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
            self.chunk_size or 0,
            self.layers,
            self.further,
            self.object_sizes,
        )
