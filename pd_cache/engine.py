"""CacheEngine: store, retrieve and lookup of a prompt's KV cache. Orchestration only.

What the pool cannot do ends the prefix, is counted and logged, and never raises. The caller's mistakes raise ValueError before anything
moves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch

from pd_cache.backends import StorageBackend, open_backend
from pd_cache.config import NodeSettings
from pd_cache.layout import KVLayout, layer_tensors, shard_tensors
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover, ChunkRun, Stored
from pd_cache.paged import PagedCopier, host_pin, open_copier, plan_slots
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Namespace, Tokens

KVCaches = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
Mask = torch.Tensor | Sequence[bool]

_COPIERS = 4
"""Sets of KV tensors remembered per engine; an engine has one, tests and re-registrations a few."""


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
        """Take over `backend`, which is closed with the engine. Raises ValueError if layout and metadata disagree."""
        described = CacheMetadata.of(
            metadata.model, layout, world_size=metadata.world_size, rank=metadata.rank, held=metadata.held
        )
        if described != metadata:
            raise ValueError(f"the KV tensors are {described}, but the metadata says {metadata}")
        self.settings = settings
        self.metadata = metadata
        self.layout = layout
        self.metrics = metrics or CacheMetrics()
        self.database = ChunkedTokenDatabase(metadata.namespace(settings.cache))
        self.backend = backend
        self.mover = ChunkMover(backend, self.database, self.metrics)
        self._shard_layout = layout.shard(metadata.held)
        self._copiers: OrderedDict[tuple[object, ...], list[PagedCopier]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def namespace(self) -> Namespace:
        """Identifies all engines whose chunks this one can use."""
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
        """Wait for the pool. Raises PoolUnavailableError after `timeout` seconds. Serving engines need not call this."""
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
        """Returns the length, in tokens, of the longest prefix that the pool holds in all shards.

        `held` tokens, from the start, are at hand already: their whole chunks are not asked for and count as found.
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
        [n], `block * block_size + offset` of each token. timeout (s) bounds the whole; without it each transfer has the
        configured one.

        What the pool refuses is counted, not raised. Raises ValueError for arguments that do not fit, before anything moves.
        """
        names, length = self._named(tokens, hashes, extra_keys)
        first = unwanted_prefix(mask, length, self.chunk_size)
        outcomes = self.mover.store(self._plan(names, length, first, kv_caches, slot_mapping), timeout)
        return self._chunks(outcomes).count(Stored.NEW) * self.chunk_size

    def store_chunks(
        self, names: Sequence[bytes], *, kv_caches: KVCaches, slot_mapping: torch.Tensor, timeout: float | None = None
    ) -> list[Stored]:
        """As `store`, for chunks that were named already (`database.name_chunks`); returns what became of each.

        slot_mapping: int [chunks * chunk_size].
        """
        run = self._plan(names, len(names) * self.chunk_size, 0, kv_caches, slot_mapping)
        return self._chunks(self.mover.store(run, timeout))

    def _chunks(self, outcomes: Sequence[Stored]) -> list[Stored]:
        """What became of each chunk, of what became of its shards."""
        held = self.metadata.held
        return [Stored.together(outcomes[start : start + held]) for start in range(0, len(outcomes), held)]

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
        """Load a prompt's chunks into the paged buffer, up to the first that the pool lacks.

        Arguments as for `store`, but `timeout` (s) bounds the whole; the mask's False prefix is not wanted. The wanted
        slots may begin with whole blocks of -1, which are left as they are: the engine has them. Returns a bool tensor
        [n] on the CPU: True where the token's KV now lies in the buffer, one contiguous run from the mask's first True.
        Slots of wanted tokens that come back False may have been overwritten; all other slots are untouched.
        """
        names, length = self._named(tokens, hashes, extra_keys)
        first = unwanted_prefix(mask, length, self.chunk_size)
        run = self._plan(names, length, first, kv_caches, slot_mapping, may_leave_out=True)
        loaded = self.mover.load(run, timeout)
        result = torch.zeros(length, dtype=torch.bool)
        result[first : first + loaded * self.chunk_size] = True
        return result

    def retrieve_chunks(
        self, names: Sequence[bytes], *, kv_caches: KVCaches, slot_mapping: torch.Tensor, timeout: float | None = None
    ) -> int:
        """As `retrieve`, for chunks that were named already; returns how many of them, from the first, lie in the buffer now."""
        length = len(names) * self.chunk_size
        run = self._plan(names, length, 0, kv_caches, slot_mapping, may_leave_out=True)
        return self.mover.load(run, timeout)

    def close(self) -> None:
        """Wait for what moves, at most `transfer.timeouts.close_ms`; close the backend, let go of the KV tensors. Idempotent."""
        if not self.mover.close(self.settings.transfer.timeouts.close_ms / 1000):
            return
        with self._lock:
            copiers = [copier for shards in self._copiers.values() for copier in shards]
            self._copiers.clear()
        for copier in copiers:  # before the backend: the staging memory is page-locked until that closes
            copier.close()
        self.backend.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _named(
        self, tokens: Tokens | None, hashes: Sequence[bytes] | None, extra_keys: Iterable[ExtraKey]
    ) -> tuple[list[bytes], int]:
        """The names of a prompt's whole chunks, and its length in tokens."""
        names = self.database.name_chunks(tokens, hashes, extra_keys)
        return names, len(tokens) if tokens is not None else len(hashes or ()) * self.layout.block_size

    def _plan(
        self,
        names: Sequence[bytes],
        length: int,
        first: int,
        kv_caches: KVCaches,
        slot_mapping: torch.Tensor,
        *,
        may_leave_out: bool = False,
    ) -> ChunkRun:
        """Checks the arguments and returns the chunks from token `first` on."""
        check_slot_mapping(slot_mapping, length)
        copiers = self._copiers_of(kv_caches)
        end = len(names) * self.chunk_size
        wanted = slot_mapping[min(first, end) : end]
        chunks = plan_slots(wanted, self.layout, self.chunk_size, may_leave_out=may_leave_out)
        return ChunkRun(self.database.keys(names[first // self.chunk_size :], self.metadata.shards), chunks, copiers)

    def _copiers_of(self, kv_caches: KVCaches) -> list[PagedCopier]:
        """One for each shard that this rank holds."""
        tensors = layer_tensors(kv_caches)
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ValueError("kv_caches must hold one tensor a layer")
        # a copier keeps its tensors' memory alive, so an address cannot come back as something else
        first = tensors[0]
        place = (*(tensor.data_ptr() for tensor in tensors), first.shape, first.stride(), first.dtype)
        with self._lock:
            copiers = self._copiers.get(place)
            if copiers is not None:
                self._copiers.move_to_end(place)
                return copiers
            found = KVLayout.from_tensors(tensors, self.layout.kind)
            if found != self.layout:
                raise ValueError(f"these KV tensors are {found}, but the engine was built for {self.layout}")
            shards = shard_tensors(tensors, self.metadata.held)
            copiers = [open_copier(views, self._shard_layout) for views in shards]
            if self.mover.closed:
                return copiers
            self._copiers[place] = copiers
            if len(self._copiers) > _COPIERS:
                for copier in self._copiers.popitem(last=False)[1]:
                    copier.close()
            return copiers


def unwanted_prefix(mask: Mask | None, length: int, chunk_size: int) -> int:
    """Returns how many tokens, from the first, a mask of `length` leaves out. Raises ValueError for any other shape of mask."""
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
    """Raises ValueError unless it is a tensor of one slot for each of a prompt's `length` tokens."""
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
        """Returns the engine of this id, and makes it if there is none yet. Does not wait for the pool.

        Raises ValueError if one exists for another config, metadata or layout. `backend` replaces the configured tiers.
        """
        with cls._lock:
            engine = cls._engines.get(instance_id)
            if engine is None:
                payload = layout.shard(metadata.held).chunk_bytes(config.cache.chunk_size)
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
        """Returns the engine of this id, if there is one."""
        with cls._lock:
            return cls._engines.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and forget the engine of this id; nothing happens if there is none."""
        with cls._lock:
            engine = cls._engines.pop(instance_id, None)
        if engine is not None:
            engine.close()
