"""CacheEngine: store, retrieve and lookup of a prompt's KV cache. Orchestration only.

Store and retrieve are pipelines over the backend's memory: while one batch of chunks is on the network, the next is
gathered or the last is scattered. What the pool cannot do ends the prefix, is counted and logged, and never raises;
what the caller got wrong is a ValueError before anything moved.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch

from pd_cache.backends import PutOutcome, Staged, StorageBackend, open_backend
from pd_cache.config import NodeSettings
from pd_cache.layout import KVLayout, layer_tensors
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import ChunkSlots, Completion, PagedCopier, host_pin, open_copier, plan_slots
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Namespace, Tokens
from transfer.errors import Status

log = logging.getLogger(__name__)

KVCaches = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
Mask = torch.Tensor | Sequence[bool]

_COPIERS = 4
"""Sets of KV tensors remembered per engine; an engine has one, tests and re-registrations a few."""


class ChunkRun(NamedTuple):
    """Chunks of a prompt: their keys, where their tokens lie in a paged cache, and what moves them."""

    keys: list[str]
    chunks: list[ChunkSlots]
    copier: PagedCopier


class StoreCounts(NamedTuple):
    """What became of the chunks of a store."""

    stored: int
    """Newly written."""
    present: int
    """There already."""
    failed: int
    """Refused or lost; the reasons are counted in the metrics."""


class _Request(NamedTuple):
    """A checked call: the chunks that are wanted."""

    length: int
    first: int
    """Tokens before the first wanted chunk."""
    run: ChunkRun


class ChunkMover:
    """Moves runs of chunks between paged caches and a backend, in overlapping steps. Thread-safe.

    The backend stays its owner's. What it cannot do is counted and never raises; what a copier raises goes to the caller,
    with all memory given back.
    """

    def __init__(self, backend: StorageBackend, chunk_size: int, metrics: CacheMetrics) -> None:
        self.backend = backend
        self.metrics = metrics
        self._chunk_size = chunk_size
        self._closed = False
        self._active = 0
        self._idle = threading.Condition()

    @property
    def closed(self) -> bool:
        return self._closed

    def store(self, run: ChunkRun, timeout: float | None = None) -> StoreCounts:
        """Store the chunks that the backend lacks; `timeout` (s) bounds each transfer."""
        chunks = len(run.keys)
        self.metrics.tokens("store", "requested", chunks * self._chunk_size)
        with self._moving() as may_move, self.metrics.timed("store"):
            if not chunks or not may_move:
                return StoreCounts(0, 0, chunks)
            statuses = self.backend.batched_wants(run.keys, timeout=timeout)
            self.metrics.outages("store", statuses)
            missing = [index for index, status in enumerate(statuses) if status is Status.MISSING]
            stored = self._put(run, missing, timeout)
        self.metrics.moved("store", stored * self.backend.payload_bytes)
        self.metrics.tokens("store", "stored", stored * self._chunk_size)
        present = statuses.count(Status.OK)
        return StoreCounts(stored, present, chunks - present - stored)

    def load(self, run: ChunkRun, timeout: float | None = None) -> int:
        """Load chunks in order until the first that is missing; how many were loaded. `timeout` as for `store`."""
        self.metrics.tokens("retrieve", "requested", len(run.keys) * self._chunk_size)
        with self._moving() as may_move, self.metrics.timed("retrieve"):
            if not run.keys or not may_move:
                return 0
            loaded = self._get(run, timeout)
        self.metrics.moved("retrieve", loaded * self.backend.payload_bytes)
        self.metrics.tokens("retrieve", "loaded", loaded * self._chunk_size)
        return loaded

    def close(self, timeout: float) -> bool:
        """Begin nothing more, and wait up to `timeout` seconds for what moves. False if it was closed before."""
        with self._idle:
            if self._closed:
                return False
            self._closed = True
            if not self._idle.wait_for(lambda: not self._active, timeout):
                log.warning("%d cache operations outlived close()", self._active)
            return True

    # --- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _moving(self) -> Iterator[bool]:
        """Keep `close` waiting while bytes move; False where the engine is closed already."""
        with self._idle:
            may_move = not self._closed
            self._active += may_move
        try:
            yield may_move
        finally:
            with self._idle:
                self._active -= may_move
                self._idle.notify_all()

    def _put(self, run: ChunkRun, missing: list[int], timeout: float | None) -> int:
        outcomes: list[PutOutcome] = []
        done = 0
        while done < len(missing):
            # one chunk first: it is on its way while the others are gathered
            indices = missing[done : done + (self.backend.batch_size if done else 1)]
            staged = self._gather(run, indices, timeout)
            if not staged:
                self.metrics.trouble("store", "no_staging", len(missing) - done)
                break
            keys = [run.keys[index] for index in indices[: len(staged)]]
            outcomes.append(self.backend.batched_put(keys, staged, timeout=timeout))
            done += len(staged)
        stored = 0
        for outcome in outcomes:
            statuses = outcome.results()
            self.metrics.outages("store", statuses)
            stored += sum(status is Status.OK for status in statuses)
        return stored

    def _gather(self, run: ChunkRun, indices: list[int], timeout: float | None) -> list[Staged]:
        """Stage chunks of `indices`, from the first, as far as there is memory; none only if none came free in time.

        Only the first waits for memory: two stores that hold some can never wait for each other.
        """
        staged: list[Staged] = []
        copies: list[Completion] = []
        try:
            for index in indices:
                memory = self.backend.stage(timeout=0.0 if staged else timeout)
                if memory is None:
                    break
                staged.append(memory)
                payload = torch.frombuffer(memory.payload, dtype=torch.uint8)
                copies.append(run.copier.gather(run.chunks[index], payload))
            for copy in copies:
                copy.wait()
        except BaseException:
            for copy in copies:  # the memory may still be written to
                copy.wait()
            for memory in staged:
                memory.release()
            raise
        return staged

    def _get(self, run: ChunkRun, timeout: float | None) -> int:
        loaded = 0
        with contextlib.closing(self.backend.batched_get(run.keys, timeout=timeout)) as fetches:
            for chunk, fetched in zip(run.chunks, fetches, strict=True):
                try:
                    if self._closed:
                        break
                    if fetched.payload is None:
                        self.metrics.trouble("retrieve", fetched.reason)
                        break
                    # waited for at once: the transfers behind this chunk run ahead meanwhile, and a reader that holds
                    # no memory while it waits for the next chunk can never keep another from going on
                    run.copier.scatter(chunk, torch.frombuffer(fetched.payload, dtype=torch.uint8)).wait()
                    loaded += 1
                finally:
                    fetched.release()
        return loaded


class CacheEngine:
    """Moves the KV cache of prompts between one paged buffer and a backend. Thread-safe.

    Tokens are given as ids (token mode), or as the engine's block hashes (hash mode); see `pd_cache.tokens`.
    """

    def __init__(
        self,
        backend: StorageBackend,
        settings: NodeSettings,
        metadata: CacheMetadata,
        layout: KVLayout,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Take over `backend`, which is closed with the engine. ValueError if layout and metadata disagree."""
        described = CacheMetadata.of(metadata.model, layout, world_size=metadata.world_size, rank=metadata.rank)
        if described != metadata:
            raise ValueError(f"the KV tensors are {described}, but the metadata says {metadata}")
        self.settings = settings
        self.metadata = metadata
        self.layout = layout
        self.metrics = metrics or CacheMetrics()
        self.database = ChunkedTokenDatabase(metadata.namespace(settings.cache))
        self.backend = backend
        self.mover = ChunkMover(backend, self.database.chunk_size, self.metrics)
        self._copiers: OrderedDict[tuple[object, ...], PagedCopier] = OrderedDict()
        self._lock = threading.Lock()
        self._annotated = False

    @property
    def namespace(self) -> Namespace:
        """All engines whose chunks this one can use."""
        return self.database.namespace

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self.database.chunk_size

    @property
    def available(self) -> bool:
        """False while the pool is known to be down: lookups are then misses and stores are dropped, at once."""
        return not self.mover.closed and self.backend.available

    def wait_available(self, timeout: float) -> None:
        """Wait for the pool; PoolUnavailableError after `timeout` seconds. Serving engines have no need to."""
        self.backend.wait_available(timeout)

    # --- the three operations ------------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: Tokens | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        held: int = 0,
        extra_keys: Iterable[ExtraKey] = (),
        timeout: float | None = None,
    ) -> int:
        """End of the longest contiguous prefix that the pool holds in all shards, in tokens.

        `held` tokens, from the start, are at hand already: whole chunks of them are not asked for and count as found.
        Asks once, with one request for all keys; `timeout` (s) bounds it.
        """
        return self.lookup_named(self.database.name_chunks(tokens, hashes, extra_keys), held=held, timeout=timeout)

    def lookup_named(self, names: Sequence[bytes], *, held: int = 0, timeout: float | None = None) -> int:
        """As `lookup`, for a prompt whose chunks are named already."""
        if self.mover.closed:
            return 0
        exists = PrefixLookup(
            self.database, lambda keys: self.backend.batched_contains(keys, timeout=timeout), self.metrics
        )
        return exists.find_named(names, held)

    def store(
        self,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        *,
        kv_caches: KVCaches,
        slot_mapping: torch.Tensor,
        hashes: Sequence[bytes] | None = None,
        extra_keys: Iterable[ExtraKey] = (),
        timeout: float | None = None,
    ) -> int:
        """Store the whole chunks of a prompt that the pool lacks; returns the tokens newly stored.

        tokens: n ids, or `hashes`: one per block, n = blocks * block_size. mask: bool [n], `FFFTTT`, the False prefix a
        whole number of chunks that need no storing. kv_caches: the engine's tensors, one a layer. slot_mapping: int
        [n], `block * block_size + offset` of each token. timeout (s) bounds each transfer.

        What the pool refuses is counted, not raised. ValueError for arguments that do not fit, before anything moved.
        """
        request = self._check(tokens, hashes, mask, kv_caches, slot_mapping, extra_keys)
        stored = self.mover.store(request.run, timeout).stored
        if stored:
            self._annotate(timeout)
        return stored * self.chunk_size

    def retrieve(
        self,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        *,
        kv_caches: KVCaches,
        slot_mapping: torch.Tensor,
        hashes: Sequence[bytes] | None = None,
        extra_keys: Iterable[ExtraKey] = (),
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Load a prompt's chunks into the paged buffer, as far as the pool has them without a hole.

        Arguments as for `store`; the mask's False prefix is not wanted. Returns a bool tensor [n] on the CPU: True where
        the token's KV now lies in the buffer, one contiguous run from the mask's first True. Slots of wanted tokens that
        come back False may have been overwritten; all other slots are untouched.
        """
        request = self._check(tokens, hashes, mask, kv_caches, slot_mapping, extra_keys)
        result = torch.zeros(request.length, dtype=torch.bool)
        loaded = self.mover.load(request.run, timeout)
        result[request.first : request.first + loaded * self.chunk_size] = True
        return result

    def close(self) -> None:
        """Wait for what moves, at most `transfer.timeouts.close_ms`; close the backend, let go of the KV tensors. Idempotent."""
        if not self.mover.close(self.settings.transfer.timeouts.close_ms / 1000):
            return
        with self._lock:
            copiers = list(self._copiers.values())
            self._copiers.clear()
        for copier in copiers:  # before the backend: the staging memory is page-locked until that closes
            copier.close()
        self.backend.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _check(
        self,
        tokens: Tokens | None,
        hashes: Sequence[bytes] | None,
        mask: Mask | None,
        kv_caches: KVCaches,
        slot_mapping: torch.Tensor,
        extra_keys: Iterable[ExtraKey],
    ) -> _Request:
        names = self.database.name_chunks(tokens, hashes, extra_keys)
        length = len(tokens) if tokens is not None else len(hashes or ()) * self.layout.block_size
        first = unwanted_prefix(mask, length, self.chunk_size)
        check_slot_mapping(slot_mapping, length)
        copier = self._copier(kv_caches)
        end = len(names) * self.chunk_size
        chunks = plan_slots(slot_mapping[min(first, end) : end], self.layout, self.chunk_size)
        keys = self.database.keys(names[first // self.chunk_size :], self.metadata.rank)
        return _Request(length, first, ChunkRun(keys, chunks, copier))

    def _copier(self, kv_caches: KVCaches) -> PagedCopier:
        tensors = layer_tensors(kv_caches)
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ValueError("kv_caches must hold one tensor a layer")
        # a copier keeps its tensors' memory alive, so an address cannot come back as something else
        first = tensors[0]
        place = (*(tensor.data_ptr() for tensor in tensors), first.shape, first.stride(), first.dtype)
        with self._lock:
            copier = self._copiers.get(place)
            if copier is not None:
                self._copiers.move_to_end(place)
                return copier
            copier = open_copier(tensors, self.layout)
            if self.mover.closed:
                return copier
            self._copiers[place] = copier
            if len(self._copiers) > _COPIERS:
                self._copiers.popitem(last=False)[1].close()
            return copier

    def _annotate(self, timeout: float | None) -> None:
        """Leave the namespace's manifest beside its chunks, once."""
        if not self._annotated:
            namespace = self.database.namespace
            status = self.backend.annotate(self.database.manifest_key, namespace.manifest(), timeout=timeout)
            self._annotated = status is Status.OK


def unwanted_prefix(mask: Mask | None, length: int, chunk_size: int) -> int:
    """How many tokens from the first the mask of a prompt of `length` leaves out. ValueError for any other shape of mask."""
    if mask is None:
        return 0
    wanted = mask if isinstance(mask, torch.Tensor) else torch.tensor(list(mask), dtype=torch.bool)
    if wanted.dtype != torch.bool or tuple(wanted.shape) != (length,):
        raise ValueError(f"mask must be {length} booleans, got {tuple(wanted.shape)} {wanted.dtype}")
    first = length - int(wanted.sum())
    if bool(wanted[:first].any()) or first % chunk_size:
        raise ValueError(
            f"mask must be a False prefix of a whole number of chunks of {chunk_size} tokens, then True; "
            f"got {first} False of {length}"
        )
    return first


def check_slot_mapping(slot_mapping: torch.Tensor, length: int) -> None:
    """ValueError unless it is a tensor of one slot for each of a prompt's `length` tokens."""
    if not isinstance(slot_mapping, torch.Tensor) or tuple(slot_mapping.shape) != (length,):
        shape = tuple(slot_mapping.shape) if isinstance(slot_mapping, torch.Tensor) else type(slot_mapping).__name__
        raise ValueError(f"slot_mapping must be a tensor of one slot for each of {length} tokens, got {shape}")


class CacheEngineBuilder:
    """The engines of this process, by instance id."""

    _engines: ClassVar[dict[str, CacheEngine]] = {}
    _lock = threading.Lock()

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: NodeSettings,
        metadata: CacheMetadata,
        layout: KVLayout,
        *,
        metrics: CacheMetrics | None = None,
        backend: Callable[[NodeSettings, int], StorageBackend] | None = None,
    ) -> CacheEngine:
        """The engine of this id, made if there is none yet; does not wait for the pool.

        ValueError if one exists for another config, metadata or layout. `backend` replaces the configured tiers.
        """
        with cls._lock:
            engine = cls._engines.get(instance_id)
            if engine is None:
                payload = layout.chunk_bytes(config.cache.chunk_size)
                metrics = metrics or CacheMetrics()
                opened = (
                    backend(config, payload)
                    if backend
                    else open_backend(config, payload, pin=host_pin(), metrics=metrics)
                )
                try:
                    engine = cls._engines[instance_id] = CacheEngine(opened, config, metadata, layout, metrics)
                except BaseException:
                    opened.close()
                    raise
            elif (engine.settings, engine.metadata, engine.layout) != (config, metadata, layout):
                raise ValueError(f"cache engine {instance_id!r} exists already, with other settings")
            return engine

    @classmethod
    def get(cls, instance_id: str) -> CacheEngine | None:
        """The engine of this id, if there is one."""
        with cls._lock:
            return cls._engines.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and forget the engine of this id; nothing happens if there is none."""
        with cls._lock:
            engine = cls._engines.pop(instance_id, None)
        if engine is not None:
            engine.close()
