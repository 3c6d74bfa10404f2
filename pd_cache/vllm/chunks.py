"""What a worker does with chunks, in either mode: with an engine of its own, or through the cache server of its host.

Both know the worker's KV tensors and speak of their blocks. Failures of the pool or the server are counted, and end a load or
leave a chunk unstored; neither call touches a block after it has returned.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from pd_cache.config import MooncakeTier, NodeSettings
from pd_cache.engine import CacheEngine, CacheEngineBuilder
from pd_cache.errors import ConfigError
from pd_cache.layout import KVLayout
from pd_cache.lookup.rpc import RpcLookupServer
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import Stored
from pd_cache.paged import Fence
from pd_cache.runtime import temporary_folder
from pd_cache.server import messages
from pd_cache.server.channel import NoAnswerError
from pd_cache.server.client import CacheClient, Move
from pd_cache.server.sharing import SharingError, record_event
from pd_cache.tokens import CacheMetadata
from pd_cache.vllm.settings import Settings
from transfer.settings import MIN_SEGMENT

log = logging.getLogger("vllm.pd_cache")

_CONNECT_S = 10.0
"""How long a worker waits at its start for a cache server; a server that comes later is still found."""
_STORE_TIMEOUT_S = 15.0
"""After which a store through a cache server is given up; an engine's own transfers have deadlines of their own."""


class Chunks(Protocol):
    """Chunks of one worker's KV. Thread-safe."""

    metrics: CacheMetrics
    lookup_url: str | None
    """Where lookups about these chunks are answered, if nobody else knows as much."""

    def mark(self) -> Any:
        """Marks the work that the calling thread has given the device so far; a store waits for it."""

    def load(self, request_id: str, names: Sequence[bytes], blocks: Sequence[int], timeout: float) -> int:
        """Load chunks into blocks, -1 for those at the start that are left out; returns how many chunks, from the first, were loaded."""

    def store(self, names: Sequence[bytes], blocks: Sequence[int], after: Any) -> list[Stored]:
        """Store chunks; what became of each. `after` is a mark."""

    def close(self, timeout: float) -> None:
        """Let go of the cache, within `timeout` seconds. Idempotent."""


class EngineChunks:
    """Chunks of a cache engine in this process."""

    def __init__(
        self, engine: CacheEngine, instance: str, kv_caches: Sequence[torch.Tensor], *, answers_lookups: bool
    ) -> None:
        """`instance` is the engine's id, by which it is destroyed at the end. With `answers_lookups`, others may ask it."""
        self.metrics = engine.metrics
        self.lookup_url: str | None = None
        self._resources = contextlib.ExitStack()
        self._resources.callback(CacheEngineBuilder.destroy, instance)
        if answers_lookups:
            folder = self._resources.enter_context(temporary_folder())
            self.lookup_url = f"ipc://{folder}/lookup"
            server = RpcLookupServer(engine, self.lookup_url, metrics=engine.metrics)
            self._resources.callback(server.close)
        self._engine = engine
        self._kv_caches = kv_caches
        self._block_size = engine.layout.block_size
        self._offsets = torch.arange(self._block_size)

    def mark(self) -> Fence:
        return Fence(self._kv_caches[0])

    def load(self, request_id: str, names: Sequence[bytes], blocks: Sequence[int], timeout: float) -> int:
        slots = self._slots(blocks)
        return self._engine.retrieve_chunks(names, kv_caches=self._kv_caches, slot_mapping=slots, timeout=timeout)

    def store(self, names: Sequence[bytes], blocks: Sequence[int], after: Fence) -> list[Stored]:
        after.follow()
        return self._engine.store_chunks(names, kv_caches=self._kv_caches, slot_mapping=self._slots(blocks))

    def close(self, timeout: float) -> None:
        self._resources.close()

    def _slots(self, blocks: Sequence[int]) -> torch.Tensor:
        """The slot of each token, -1 for those of blocks that are left out."""
        first = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1)
        return torch.where(first < 0, first, first * self._block_size + self._offsets).flatten()


class ServerChunks:
    """Chunks of the cache server that this worker has lent its KV tensors to."""

    def __init__(
        self, client: CacheClient, layout: KVLayout, kv_caches: Sequence[torch.Tensor], metrics: CacheMetrics
    ) -> None:
        """Take over `client`, which has registered `kv_caches`."""
        self.metrics = metrics
        self.lookup_url: str | None = None
        self._client = client
        self._kv_caches = kv_caches
        self._chunk_bytes = layout.chunk_bytes(client.chunk_size)

    def mark(self) -> Any:
        return record_event(self._kv_caches[0])

    def load(self, request_id: str, names: Sequence[bytes], blocks: Sequence[int], timeout: float) -> int:
        move = self._move("retrieve", messages.Retrieve, request_id, names, blocks, None, timeout)
        if not isinstance(move.answer, messages.Loaded):
            return 0
        loaded = move.answer.chunks
        self._count("retrieve", "loaded", loaded)
        if loaded < len(names):  # the server counts which chunk failed for which reason
            self.metrics.trouble("retrieve", "not_loaded")
        return loaded

    def store(self, names: Sequence[bytes], blocks: Sequence[int], after: Any) -> list[Stored]:
        move = self._move("store", messages.Store, "", names, blocks, after, _STORE_TIMEOUT_S)
        if not isinstance(move.answer, messages.Stored) or len(move.answer.outcomes) != len(names):
            return [Stored.NOT] * len(names)
        outcomes = [Stored(outcome) for outcome in move.answer.outcomes]
        self._count("store", "stored", move.answer.stored)
        self.metrics.trouble("store", "not_stored", move.answer.failed)
        return outcomes

    def close(self, timeout: float) -> None:
        self._client.close()

    def _move(
        self,
        op: str,
        kind: type[messages.Store] | type[messages.Retrieve],
        session: str,
        names: Sequence[bytes],
        blocks: Sequence[int],
        event: Any,
        timeout: float,
    ) -> Move:
        """Do it, and wait for its end."""
        self.metrics.tokens(op, "requested", len(names) * self._client.chunk_size)
        with self.metrics.timed(op):
            move = self._client.move(kind, session, names, blocks, event, timeout)
            move.wait()
        if move.failure:
            self.metrics.trouble(op, move.failure, len(names))
        return move

    def _count(self, op: str, outcome: str, chunks: int) -> None:
        self.metrics.moved(op, chunks * self._chunk_bytes)
        self.metrics.tokens(op, outcome, chunks * self._client.chunk_size)


def open_chunks(
    settings: Settings,
    metadata: CacheMetadata,
    layout: KVLayout,
    kv_caches: Sequence[torch.Tensor],
    instance: str,
    rank: int,
    ranks: int,
    metrics: CacheMetrics,
) -> Chunks:
    """The cache of tensor-parallel rank `rank` of `ranks`, as the settings have it. Does not wait for the pool.

    ConfigError for what cannot work, RefusedError in the words of a cache server that does not take this worker.
    """
    if settings.server_url is not None:
        return _open_server(settings.server_url, settings, metadata, layout, kv_caches, metrics)
    node = settings.node
    try:
        engine = CacheEngineBuilder.get_or_create(
            instance, _of_rank(node, rank, ranks), metadata, layout, metrics=metrics
        )
    except ValueError as error:  # what the file cannot know: how large a chunk of this model is
        raise ConfigError(f"transfer.staging_size: {node.transfer.staging_size}: {error}") from None
    # with several ranks, each has tiers of its own, and none knows what the others hold, so the pool is asked
    tiered = any(not isinstance(tier, MooncakeTier) for tier in node.cache.tiers)
    return EngineChunks(engine, instance, kv_caches, answers_lookups=tiered and ranks == 1)


def _open_server(
    url: str,
    settings: Settings,
    metadata: CacheMetadata,
    layout: KVLayout,
    kv_caches: Sequence[torch.Tensor],
    metrics: CacheMetrics,
) -> Chunks:
    client = CacheClient.of(url, None, "worker", metadata, settings.node.cache)
    try:
        try:
            client.wait_ready(_CONNECT_S)
        except NoAnswerError:
            log.warning("pd-cache: no cache server at %s yet; prompts are computed until one comes", url)
        try:
            client.register(kv_caches, layout.kind)
        except SharingError as error:
            raise ConfigError(f"the KV cache cannot be lent to the cache server at {url}: {error}") from None
    except BaseException:
        client.close()
        raise
    log.info("pd-cache: the cache server at %s holds this worker's cache", url)
    return ServerChunks(client, layout, kv_caches, metrics)


def _of_rank(node: NodeSettings, rank: int, ranks: int) -> NodeSettings:
    """Each rank's process gives its part of the node's memory; all of it comes from the first where parts are too small."""
    part = node.segment_size // ranks
    if part < MIN_SEGMENT:
        part = node.segment_size if rank == 0 else 0
    return msgspec.structs.replace(node, segment_size=part)
