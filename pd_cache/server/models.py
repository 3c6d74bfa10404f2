"""The models that a cache server serves, and the backend for each size of chunk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, LayerGroup
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.errors import PdCacheError
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover
from pd_cache.paged import host_pin
from pd_cache.server.protocol import EngineIdentity, RefusalError
from pd_cache.tiers import StorageBackend, open_backend

log = logging.getLogger(__name__)

_MAX_BACKENDS = 8
"""The most payload sizes at a time. Each has its own backend. A DeepSeek V4 has five."""


class EngineGroup(NamedTuple):
    """The part of an engine's identity that decides with which engines it shares chunks, if their tensors
    agree, too."""

    model: str
    world_size: int
    shards_per_rank: int
    """How many shards of a chunk each rank holds."""
    block_size: int
    hash_mode: Literal["tokens", "blocks"]
    hash_seed: str
    chunk_size: int
    layers: LayerGroup | None
    """The layer group; None if the model's layers form a single group."""


class Model:
    """The model of an engine group. It exists once a worker of the group has registered."""

    def __init__(
        self,
        group: EngineGroup,
        metadata: CacheMetadata,
        cache: CacheConfig,
        backend: StorageBackend,
        metrics: CacheMetrics,
    ) -> None:
        self.group = group
        self.metadata = metadata
        named = replace(
            cache, chunk_size=group.chunk_size, hash_mode=group.hash_mode, hash_seed=group.hash_seed
        )
        self.database = ChunkedTokenDatabase(metadata.namespace(named))
        self.shards = [replace(metadata, rank=rank).shards for rank in range(group.world_size)]
        """The numbers of the shards that each rank holds."""
        self.workers: set[str] = set()
        """The clients that have registered tensors of this model."""
        self.mover = ChunkMover(backend, self.database, metrics)


def memory_size(payload_bytes: int, object_sizes: Sequence[int]) -> int:
    """Returns the slot size for the payloads of a layer group, in bytes: `payload_bytes`, or a larger size
    from `object_sizes`.

    `object_sizes` are the payload sizes of all layer groups of the engine. Groups of similar size share a
    backend. A slot is at most twice as large as its payload. The result does not depend on the order in which
    the groups register.
    """
    size = 0
    for larger in sorted({payload_bytes, *object_sizes}, reverse=True):
        if not size or size > 2 * larger:
            size = larger
        if larger == payload_bytes:
            break
    return size


class ServedModels:
    """All models of a server. Thread-safe."""

    def __init__(
        self,
        settings: NodeSettings,
        metrics: CacheMetrics,
        released: Callable[[StorageBackend], None],
    ) -> None:
        """`released` is called with each backend before it is closed."""
        self._settings = settings
        self._metrics = metrics
        self._released = released
        self._opening = threading.Lock()
        self.by_group: dict[EngineGroup, Model] = {}
        """The model of each engine group with a registered worker, now or before."""
        self._backends: dict[int, StorageBackend] = {}
        """The backends, by payload size."""
        self._segment_of: int | None = None
        """The size whose backend gives the segment to the pool. Only one backend does."""

    def groups(self, engine: EngineIdentity) -> list[EngineGroup]:
        """Returns an engine group for each of an engine's layer groups. The engine may choose the hash mode
        if the file says `auto`.

        Raises RefusalError if the hash modes differ.
        """
        cache = self._settings.cache
        mode = engine.hash_mode or cache.named_by
        if cache.hash_mode not in ("auto", mode):
            raise RefusalError(
                "mismatch",
                f"this server's cache.hash_mode is {cache.hash_mode}, the engine's is {mode}; set the same one for both",
            )
        seed = engine.hash_seed or cache.hash_seed
        chunk_size = (
            (engine.chunk_size or cache.chunk_tokens) if cache.chunk_size == "auto" else cache.chunk_size
        )
        return [
            EngineGroup(
                engine.model,
                part.world_size,
                part.shards_per_rank,
                part.block_size,
                mode,
                seed,
                chunk_size,
                part.layers,
            )
            for part in (engine, *engine.further)
        ]

    def serve(
        self, group: EngineGroup, layout: KVLayout, client: str, object_sizes: Sequence[int] = ()
    ) -> Model:
        """Adds this client to the workers of the engine group's model, and returns the model. Makes the model
        for its first worker.

        `object_sizes` are the payload sizes of all layer groups of the worker; see `memory_size`.

        Raises RefusalError if the worker's KV tensors differ from those of the model's other workers, or if
        there is no room for its chunks. Raises LayoutError if its pages cannot be cut into as many shards as
        the group says.
        """
        if layout.block_size != group.block_size:
            raise RefusalError(
                "mismatch",
                f"the KV tensors have blocks of {layout.block_size} tokens, the engine said {group.block_size}",
            )
        metadata = CacheMetadata.of(
            group.model,
            layout,
            world_size=group.world_size,
            shards_per_rank=group.shards_per_rank,
            group=group.layers,
        )
        with self._opening:
            model = self.by_group.get(group)
            if model is None or model.metadata != metadata:
                if model is not None and model.workers - {client}:
                    raise RefusalError(
                        "mismatch",
                        f"{group.model} is already served by workers whose KV tensors are {model.metadata}; these are "
                        f"{metadata}: their chunks are not interchangeable",
                    )
                cache = self._settings.cache
                payload_bytes = layout.shard(group.shards_per_rank).chunk_bytes(group.chunk_size)
                backend = self._backend(memory_size(payload_bytes, object_sizes))
                if model is not None:
                    model.mover.close(0.0)
                model = self.by_group[group] = Model(group, metadata, cache, backend, self._metrics)
            model.workers.add(client)
            return model

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self.by_group.values()))

    @property
    def backends(self) -> list[StorageBackend]:
        """The backends, one for each size of chunk."""
        return list(self._backends.values())

    def close(self) -> None:
        """Closes the backends. No store or retrieve may be running any more."""
        for backend in self.backends:
            backend.close()

    def _backend(self, payload_bytes: int) -> StorageBackend:
        """Returns the backend for payloads of up to this size."""
        if payload_bytes in self._backends:
            return self._backends[payload_bytes]
        self._make_room()
        if len(self._backends) >= _MAX_BACKENDS:
            raise RefusalError(
                "mismatch",
                f"chunks of {payload_bytes} bytes would be size number {_MAX_BACKENDS + 1} on this server, which already serves "
                f"{sorted(self._backends)} bytes; stop the engines of one of these",
            )
        settings = self._settings
        if self._segment_of is not None:
            settings = replace(settings, segment_size=0)
        try:
            opened = open_backend(settings, payload_bytes, pin=host_pin(), metrics=self._metrics)
        except (ValueError, PdCacheError) as error:
            raise RefusalError("mismatch", f"no room for chunks of {payload_bytes} bytes: {error}") from None
        self._backends[payload_bytes] = opened
        if settings.segment_size:
            self._segment_of = payload_bytes
        return opened

    def _make_room(self) -> None:
        """Closes the backends that have no worker, because engines with another size need the memory. Keeps
        the backend with the segment if there is room without it, because other nodes' chunks are in it."""
        used = {id(model.mover.backend) for model in self if model.workers}
        idle = [size for size, backend in self._backends.items() if id(backend) not in used]
        for size in sorted(idle, key=lambda size: size == self._segment_of):
            if size != self._segment_of or len(self._backends) >= _MAX_BACKENDS:
                self._close(size)

    def _close(self, size: int) -> None:
        backend = self._backends.pop(size)
        if size == self._segment_of:
            self._segment_of = None
        for group in [group for group, model in self.by_group.items() if model.mover.backend is backend]:
            self.by_group.pop(group).mover.close(self._settings.transfer.timeouts.close_ms / 1000)
        self._released(backend)
        backend.close()
        log.info("no longer serving chunks of %d bytes, which no engine has any more", backend.payload_bytes)
