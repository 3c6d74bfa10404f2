"""The cache. A `BlockCache` finds, stores and loads chunks by their names and by ids of blocks. `CacheEngine`
is the `BlockCache` of this process: it checks the arguments, and `mover.py` moves the chunks. `PromptCache`
offers the same operations by tokens, masks and slot mappings.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Names, Tokens
from pd_cache.config import NodeSettings
from pd_cache.groups import LayerGroups
from pd_cache.layout import KVCaches, KVLayout, layer_tensors, shard_tensors
from pd_cache.lookup import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover, ChunkRun, plan_run
from pd_cache.paged import host_pin, mark, open_copier
from pd_cache.paged.base import BlocksOrSlots, PagedCopier, Slots
from pd_cache.reasons import Found, Loaded, StoreOutcome
from pd_cache.tiers import StorageBackend, open_backend
from pd_cache.versions import PRESENT, WeightsVersion
from transfer.deadlines import Timeout, end_in

Mask = Tensor | Sequence[bool]


class BlockCache(Protocol):
    """A cache over one paged KV cache, in this process (`CacheEngine`) or in the host's cache server
    (`RemoteCache`). Thread-safe.

    Trouble in the pool or the server is counted and never raised: the found prefix is shorter, or a chunk is
    not stored. The caller's mistakes raise ValueError before anything moves. No call touches a block after it
    has returned.
    """

    metrics: CacheMetrics
    version: WeightsVersion

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""

    @property
    def block_size(self) -> int:
        """Tokens per block of the paged cache."""

    @property
    def label(self) -> str | None:
        """The label of this engine's weights (`pd_cache.versions`). None from the time when they change until
        they get a label."""

    @property
    def available(self) -> bool:
        """False while the pool or the server is known to be unreachable. Every call is then a miss at
        once."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Registers KV tensors, one per layer, in layer order. Calls without tensors use them."""

    def name_chunks(
        self, tokens: Tokens | None, hashes: Names | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """Returns the names of a prompt's whole chunks, first to last, 8 to 16 bytes each.

        The prompt is given as token ids or, in hash mode, as the engine's block hashes. `extra_keys` are the
        request's isolation, and go with token ids only. Raises ValueError for both or neither, and for the
        form that does not fit the namespace's hash mode.
        """

    def find(
        self, names: Names, *, chunks_at_hand: int = 0, session: str = "", timeout: Timeout = None
    ) -> Found:
        """Returns how many leading chunks the cache holds with every shard, and why it holds no more.

        The first `chunks_at_hand` chunks are not looked up and count as found. A cache server protects the
        found chunks from eviction until `session` has loaded them or ends. `timeout` is in seconds.
        """

    def store(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        after: Any = None,
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> list[StoreOutcome]:
        """Stores the chunks that lie in `blocks` of `kv_caches` (by default, of the registered tensors).
        Returns the outcome of each.

        `label` is the label that the engine had before the chunks were computed, by default the present one.
        Nothing is stored if it is None, or if the engine has another label by now. Do not store chunks if the
        engine has changed its label in between and got the same label again: the cache cannot detect this.

        `after` is a `mark`: the chunks are read once the work before it is done. If loads need only the last
        chunks of these layers (`LayerGroup.tail`), the first blocks may be -1; zeros are stored for them.
        `timeout` is in seconds.
        """

    def load(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        session: str = "",
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> Loaded:
        """Loads chunks into `blocks`, in order. Returns how many were loaded, from which tiers, and why the
        next chunk was not loaded.

        `blocks` are the ids of the chunks' blocks, `chunk_size // block_size` for each name, or the `Slots`
        of their tokens. The first and the last blocks may be -1: they are skipped. Blocks of chunks that were
        not loaded may have been overwritten; all other blocks are untouched. `label` is the label that the
        engine had before the lookup, by default the present one. If the engine has another label when the
        load ends, nothing counts as loaded. `timeout` is in seconds.
        """

    def end(self, session: str) -> None:
        """Releases what a session protects. Does nothing if there is no such session."""

    def mark(self) -> Any:
        """Returns a mark of the work that the calling thread has queued on the device so far. A store can
        wait for this work."""

    def close(self) -> None:
        """Releases the cache and the KV tensors. Idempotent."""


# --- the cache of this process ----------------------------------------------------------------------

_REMEMBERED = 4
"""How many sets of KV tensors an engine remembers. An engine usually has one set; tests and new registrations
add a few."""


class _Pages(NamedTuple):
    """A set of KV tensors, and a copier for each shard that this rank holds."""

    tensors: list[Tensor]
    copiers: list[PagedCopier]

    def lend(self) -> contextlib.AbstractContextManager[list[PagedCopier]]:
        """Lends the copiers; see `pd_cache.mover.ChunkRun`."""
        return contextlib.nullcontext(self.copiers)

    def close(self) -> None:
        for copier in self.copiers:
            copier.close()


class CacheEngine(PrefixLookup):
    """Moves the KV cache of prompts between one paged buffer and a backend. A `BlockCache`; see there.
    Thread-safe."""

    backend: StorageBackend

    def __init__(
        self,
        backend: StorageBackend,
        settings: NodeSettings,
        metadata: CacheMetadata,
        layout: KVLayout,
        metrics: CacheMetrics | None = None,
        version: WeightsVersion | None = None,
    ) -> None:
        """Takes over `backend`, and closes it with the engine. `version`: see `PrefixLookup`.
        Raises ValueError if layout and metadata disagree."""
        described = CacheMetadata.of(
            metadata.model,
            layout,
            world_size=metadata.world_size,
            rank=metadata.rank,
            shards_per_rank=metadata.shards_per_rank,
            group=metadata.group,
        )
        if described != metadata:
            raise ValueError(f"the KV tensors are {described}, but the metadata says {metadata}")
        self.settings = settings
        self.metadata = metadata
        self.layout = layout
        self.database = ChunkedTokenDatabase(metadata.namespace(settings.cache))
        self.chunk_size = self.database.chunk_size
        self.block_size = layout.block_size
        metrics, version = metrics or CacheMetrics(), version or WeightsVersion()
        self.mover = ChunkMover(backend, self.database, metrics, version)
        super().__init__(LayerGroups([self.database]), backend, version, metrics, self.mover.history)
        self._registered: _Pages | None = None
        self._remembered: OrderedDict[tuple[object, ...], _Pages] = OrderedDict()
        self._lock = threading.Lock()

    def wait_available(self, timeout: float) -> None:
        """Waits for the pool. Raises PoolUnavailableError after `timeout` seconds. Serving engines need not
        call this."""
        self.backend.wait_available(timeout)

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Registers the KV tensors to use from now on. Raises ValueError for tensors that do not have the
        engine's layout."""
        self._registered = self._pages(kv_caches)

    def name_chunks(
        self, tokens: Tokens | None, hashes: Names | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """See `BlockCache.name_chunks`."""
        return self.database.name_chunks(tokens, hashes, extra_keys)

    # --- loads and stores -----------------------------------------------------------------------------------

    def store(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        *,
        kv_caches: KVCaches | None = None,
        after: Callable[[], None] | None = None,
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> list[StoreOutcome]:
        """Stores the chunks that the pool lacks; see `BlockCache.store`. Without a `timeout`, each transfer
        has the configured time-out."""
        end, run = end_in(timeout), self._run(names, blocks, kv_caches, label, loads=False)
        if after is not None:
            after()
        return self.mover.store(run, end)

    def load(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        *,
        kv_caches: KVCaches | None = None,
        session: str = "",
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> Loaded:
        """Loads chunks into `blocks`, in order, up to the first missing chunk; see `BlockCache.load`."""
        end, run = end_in(timeout), self._run(names, blocks, kv_caches, label, loads=True)
        return self.mover.load(run, end)

    def mark(self) -> Callable[[], None] | None:
        """Returns a mark of the work that the calling thread has queued on the device so far.
        `store(after=…)` waits for this work."""
        return mark(self._pages(None).tensors[0])

    def close(self) -> None:
        """Waits at most `transfer.timeouts.close_ms` for loads and stores under way, then closes the backend
        and releases the KV tensors. Idempotent."""
        self.closed = True
        if not self.mover.close(self.settings.transfer.timeouts.close_ms / 1000):
            return
        with self._lock:
            remembered = list(self._remembered.values())
            self._remembered.clear()
            self._registered = None
        for pages in remembered:  # first: they page-lock the staging memory
            pages.close()
        self.backend.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _run(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        kv_caches: KVCaches | None,
        label: str | None,
        *,
        loads: bool,
    ) -> ChunkRun:
        """Checks the arguments of a load or store. Returns what the mover takes."""
        lend, shards = self._pages(kv_caches).lend, self.metadata.shards
        label = self.label if label == PRESENT else label
        return plan_run(self.database, self.layout, names, blocks, shards, lend, label, loads=loads)

    def _pages(self, kv_caches: KVCaches | None) -> _Pages:
        """Returns these tensors, or the registered ones, with their copiers."""
        if kv_caches is None:
            if self._registered is None:
                raise ValueError("no KV tensors: call register_kv_caches first")
            return self._registered
        tensors = layer_tensors(kv_caches)
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise ValueError("kv_caches must hold one tensor a layer")
        # a copier keeps its tensors' memory alive, so no other tensor can get this address
        place = tuple((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        with self._lock:
            pages = self._remembered.get(place)
            if pages is not None:
                self._remembered.move_to_end(place)
                return pages
            found = KVLayout.from_tensors(tensors, self.layout.kind, block_size=self.block_size)
            if found != self.layout:
                raise ValueError(f"these KV tensors are {found}, but the engine was built for {self.layout}")
            shards = self.metadata.shards_per_rank
            shard = self.layout.shard(shards)
            pages = _Pages(tensors, [open_copier(views, shard) for views in shard_tensors(tensors, shards)])
            if not self.closed:
                self._remembered[place] = pages
                if len(self._remembered) > _REMEMBERED:
                    # forgets the tensors that were used longest ago, but never the registered ones
                    oldest = next(
                        key for key, used in self._remembered.items() if used is not self._registered
                    )
                    self._remembered.pop(oldest).close()
            return pages


class CacheEngineBuilder:
    """A registry of this process's engines, by instance id."""

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
        version: WeightsVersion | None = None,
    ) -> CacheEngine:
        """Returns the engine with this id. If there is none, creates it, without waiting for the pool.

        Raises ValueError if one exists for another config, metadata or layout. `backend` replaces the
        configured tiers; `version`: see `CacheEngine`.
        """
        with cls._lock:
            engine = cls._engines.get(instance_id)
            if engine is None or engine.closed:
                payload = layout.shard(metadata.shards_per_rank).chunk_bytes(config.cache.chunk_tokens)
                metrics = metrics or CacheMetrics()
                opened = (
                    backend(config, payload)
                    if backend
                    else open_backend(config, payload, pin=host_pin(), metrics=metrics)
                )
                try:
                    engine = cls._engines[instance_id] = CacheEngine(
                        opened, config, metadata, layout, metrics, version
                    )
                except BaseException:
                    opened.close()
                    raise
            elif (engine.settings, engine.metadata, engine.layout) != (config, metadata, layout):
                raise ValueError(f"cache engine {instance_id!r} exists already, with other settings")
            return engine

    @classmethod
    def get(cls, instance_id: str) -> CacheEngine | None:
        """Returns the engine with this id, if there is one."""
        with cls._lock:
            return cls._engines.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Closes and forgets the engine with this id. Does nothing if there is none."""
        with cls._lock:
            engine = cls._engines.pop(instance_id, None)
        if engine is not None:
            engine.close()


# --- by tokens and slots ----------------------------------------------------------------------


class _Wanted(NamedTuple):
    names: list[bytes]
    places: Slots
    first: int
    """The first wanted token."""
    length: int
    """The prompt's length in tokens."""


class PromptCache:
    """`lookup`, `store` and `retrieve` for prompts, given as token ids or as the engine's block hashes.
    Thread-safe.

    Trouble in the pool is counted and never raised. The caller's mistakes raise ValueError before anything
    moves.
    """

    def __init__(self, cache: BlockCache) -> None:
        """The caller keeps ownership of `cache`."""
        self.cache = cache

    def lookup(
        self,
        tokens: Tokens | None = None,
        *,
        hashes: Names | None = None,
        at_hand: int = 0,
        extra_keys: Iterable[ExtraKey] = (),
        session: str = "",
        timeout: Timeout = None,
    ) -> int:
        """Returns the length, in tokens, of the longest prefix that the cache holds.

        The whole chunks among the first `at_hand` tokens are not looked up and count as found. `timeout` (s)
        bounds the request.
        """
        size, names = self.cache.chunk_size, self.cache.name_chunks(tokens, hashes, extra_keys)
        found = self.cache.find(names, chunks_at_hand=at_hand // size, session=session, timeout=timeout)
        return found.chunks * size

    def store(
        self,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        *,
        slot_mapping: Tensor,
        kv_caches: Any = None,
        hashes: Names | None = None,
        extra_keys: Iterable[ExtraKey] = (),
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> int:
        """Stores the whole chunks of a prompt that the pool lacks. Returns how many tokens were newly stored.

        The prompt of n tokens is given as `tokens`, their n ids, or as `hashes`, one for each block.

        - mask: bool [n], False and then True (`FFFTTT`). The False tokens are not stored. They must be a
          whole number of chunks.
        - slot_mapping: int [n], `block * block_size + offset` of each token.
        - kv_caches: the engine's tensors, one per layer; by default the registered ones.
        - label: the label of the weights that computed the KV, if weights change while the engine runs
          (`BlockCache.store`).
        - timeout: the time for the whole call, in seconds. Without it, each transfer has the configured
          time-out.
        """
        wanted = self._wanted(tokens, mask, slot_mapping, hashes, extra_keys)
        outcomes = self.cache.store(
            wanted.names, wanted.places, kv_caches=kv_caches, label=label, timeout=timeout
        )
        return outcomes.count(StoreOutcome.NEW) * self.cache.chunk_size

    def retrieve(
        self,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        *,
        slot_mapping: Tensor,
        kv_caches: Any = None,
        hashes: Names | None = None,
        extra_keys: Iterable[ExtraKey] = (),
        session: str = "",
        timeout: Timeout = None,
    ) -> Tensor:
        """Loads a prompt's chunks into the paged buffer, up to the first chunk that the pool lacks.

        Returns a bool tensor [n] on the CPU: True for each token whose KV was loaded. These tokens are one
        contiguous run from the mask's first True. Slots of wanted tokens that were not loaded may have been
        overwritten; all other slots are untouched.

        The arguments are those of `store`, with two differences. The mask's False tokens are not loaded. The
        slots after them may begin with whole blocks of -1, for blocks that the engine has; they are skipped.
        `session` is that of the lookup.
        """
        wanted = self._wanted(tokens, mask, slot_mapping, hashes, extra_keys)
        loaded = self.cache.load(
            wanted.names, wanted.places, kv_caches=kv_caches, session=session, timeout=timeout
        )
        result = torch.zeros(wanted.length, dtype=torch.bool)
        result[wanted.first : wanted.first + loaded.chunks * self.cache.chunk_size] = True
        return result

    def _wanted(
        self,
        tokens: Tokens | None,
        mask: Mask | None,
        slot_mapping: Tensor,
        hashes: Names | None,
        extra_keys: Iterable[ExtraKey],
    ) -> _Wanted:
        """Checks the arguments and returns the part of the prompt that is wanted."""
        cache, size = self.cache, self.cache.chunk_size
        names = cache.name_chunks(tokens, hashes, extra_keys)
        length = len(tokens) if tokens is not None else len(hashes or ()) * cache.block_size
        first = 0
        if mask is not None:
            wanted = mask if isinstance(mask, Tensor) else torch.tensor(list(mask), dtype=torch.bool)
            if wanted.dtype != torch.bool or tuple(wanted.shape) != (length,):
                raise ValueError(f"mask must be {length} booleans, got {tuple(wanted.shape)} {wanted.dtype}")
            first = length - int(wanted.sum())
            if bool(wanted[:first].any()) or first % size:
                raise ValueError(
                    f"mask must be a False prefix of a whole number of chunks of {size} tokens, then True; got {first} "
                    f"False of {length}"
                )
        if not isinstance(slot_mapping, Tensor) or tuple(slot_mapping.shape) != (length,):
            got = getattr(slot_mapping, "shape", type(slot_mapping))
            raise ValueError(
                f"slot_mapping must be a tensor of one slot for each of {length} tokens, got {got}"
            )
        end = len(names) * size
        return _Wanted(names[first // size :], Slots(slot_mapping[min(first, end) : end]), first, length)
