"""ChunkMover: moves runs of chunks between a paged cache and a backend, for an engine's own cache and for a
cache server.

Store and load are pipelines over the backend's memory. While a batch of chunks is on the network, a store
gathers the next batch, and a load scatters the batch before.

    load   ->  _scatter                         ->  backend.batched_fetch
    store  ->  _store_all, _put: batch by batch  ->  _gather: one batch  ->  backend.batched_put

The backend is the pool (`tiers/mooncake.py`), or several tiers (`tiers/hybrid.py`). It *fetches* objects into
memory. The pool *gets* them from Mooncake, and a disk *reads* them. A *load* ends in the engine's blocks; the
metrics and `PromptCache` call it *retrieve*.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch

from pd_cache.chunks import ChunkedTokenDatabase, Names
from pd_cache.layout import KVLayout
from pd_cache.lookup import closed_in_child
from pd_cache.metrics import CacheMetrics
from pd_cache.paged.base import BlocksOrSlots, PagedCopier, PendingCopy, plan_named
from pd_cache.reasons import ChunkHistory, Loaded, StoreOutcome, TierChunks, miss_reason
from pd_cache.tiers import PutOutcome, Staged, StorageBackend
from pd_cache.tiers.memory import Fetched, TierKind
from pd_cache.versions import FIRST, WeightsVersion
from transfer.deadlines import End
from transfer.errors import Status

log = logging.getLogger(__name__)


class ChunkRun(NamedTuple):
    """Chunks of a prompt: their names, the keys of their objects, and their blocks in a paged cache."""

    names: Names
    keys: list[str]
    """Chunk by chunk, and within a chunk shard by shard."""
    chunks: list[torch.Tensor]
    """The blocks of each chunk."""
    shards: int
    lend: Callable[[], AbstractContextManager[Sequence[PagedCopier]]]
    """Lends the copier of each shard for a batch of copies. Entering or leaving raises if the blocks must not
    be touched."""
    label: str | None = FIRST
    """The label of the weights in the keys. If it is None, nothing is moved."""

    def part(self, first: int, end: int) -> ChunkRun:
        """Returns the run of the chunks from `first` to before `end`."""
        keys = self.keys[first * self.shards : end * self.shards]
        return self._replace(names=self.names[first:end], keys=keys, chunks=self.chunks[first:end])

    def place(self, index: int, payload: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the blocks of the object with this index, and its payload, as copiers take them."""
        return self.chunks[index // self.shards], torch.frombuffer(payload, dtype=torch.uint8)


def plan_run(
    database: ChunkedTokenDatabase,
    layout: KVLayout,
    names: Names,
    blocks: BlocksOrSlots,
    shards: Sequence[int],
    lend: Callable[[], AbstractContextManager[Sequence[PagedCopier]]],
    label: str | None,
    *,
    loads: bool,
) -> ChunkRun:
    """Returns the run of these shards of chunks, to load or to store. Raises ValueError if the tensors do not
    have these blocks, or if these are not equally many chunks as the names."""
    tail = database.namespace.tail
    chunks = plan_named(names, blocks, layout, database.chunk_size, loads=loads, tail=tail)
    return ChunkRun(names, database.keys(names, shards, label or FIRST), chunks, len(shards), lend, label)


def _checksums(copies: Iterable[PendingCopy]) -> list[int]:
    """Begins all copies, and waits for them. Returns the checksum of the bytes in the blocks, for each."""
    begun: list[PendingCopy] = []
    try:
        for copy in copies:
            begun.append(copy)
        return [copy.wait() for copy in begun]
    except BaseException:
        for copy in begun:  # waits, because the memory may still be read or written
            with contextlib.suppress(Exception):
                copy.wait()
        raise


def _leading(together: Sequence[Fetched]) -> tuple[list[memoryview], str]:
    """Returns the payloads up to the first missing object, and why that is missing; empty if none is."""
    payloads: list[memoryview] = []
    for fetched in together:
        if fetched.payload is None:
            return payloads, fetched.reason or Status.CLOSED.value
        payloads.append(fetched.payload)
    return payloads, ""


class ChunkMover:
    """Moves runs of chunks between paged caches and a backend, in overlapping steps. Thread-safe.

    The caller keeps ownership of the backend. The backend's failures are counted and never raised. A copier's
    errors are raised to the caller, after all memory has been given back.
    """

    def __init__(
        self,
        backend: StorageBackend,
        database: ChunkedTokenDatabase,
        metrics: CacheMetrics,
        version: WeightsVersion | None = None,
    ) -> None:
        """`version`: the version of the engine's weights; None if the caller itself compares the labels of
        runs."""
        self.backend = backend
        self.metrics = metrics
        self.history = ChunkHistory()
        """The chunks that were stored or found here."""
        self._database = database
        self._payload_bytes = database.namespace.chunk_bytes // database.namespace.shards
        self._version = version
        self._annotated = False
        self.closed = False
        """True after `close`, and in a forked child."""
        self._under_way = 0
        self._idle = threading.Condition()
        closed_in_child.add(self)

    def store(self, run: ChunkRun, end: End = None) -> list[StoreOutcome]:
        """Stores the objects that the backend lacks. Returns the outcome of each chunk.

        The call ends by `end`, on the monotonic clock; without it, each transfer has the configured time-out.
        """
        shards, chunk_size = run.shards, self._database.chunk_size
        self.metrics.tokens("store", "requested", len(run.names) * chunk_size)
        outcomes = [StoreOutcome.NOT] * len(run.keys)
        with self._moving() as may_move, self.metrics.timed("store"):
            if outdated := self.outdated(run):
                self.metrics.trouble("store", outdated, len(run.names))
            elif may_move:
                outcomes = self._store_all(run, end)
        stored = outcomes.count(StoreOutcome.NEW)
        self.metrics.moved("store", stored * self._payload_bytes, self._database.namespace.group)
        self.metrics.tokens("store", "stored", stored * chunk_size // shards)
        outcomes = [
            StoreOutcome.together(outcomes[at : at + shards]) for at in range(0, len(outcomes), shards)
        ]
        self.history.note(
            [name for name, got in zip(run.names, outcomes, strict=True) if got is not StoreOutcome.NOT]
        )
        return outcomes

    def load(self, run: ChunkRun, end: End = None) -> Loaded:
        """Loads chunks into their blocks, in order, up to the first missing chunk. Returns how many were
        loaded, from which tiers, and why the next chunk was not loaded.

        No chunk counts as loaded if the engine has another label at the end. The call ends by `end`, as in
        `store`.
        """
        self.metrics.tokens("retrieve", "requested", len(run.names) * self._database.chunk_size)
        with self._moving() as may_move, self.metrics.timed("retrieve"):
            if not run.keys:
                return Loaded(0)
            if not may_move:
                return Loaded(0, "not_asked")
            kinds: list[TierKind] = []
            reason: str = self.outdated(run)
            if not reason:
                kinds, reason = self._scatter(run, end)
                if reason != "none":
                    late = len(run.names) - len(kinds) // run.shards if reason == "deadline" else 1
                    self.metrics.trouble("retrieve", reason, late)
            if outdated := self.outdated(run):
                reason = outdated
                self.metrics.trouble("retrieve", reason, len(run.names))
                kinds.clear()
        shards, loaded = run.shards, len(kinds) // run.shards
        self.metrics.moved("retrieve", len(kinds) * self._payload_bytes, self._database.namespace.group)
        self.metrics.tokens("retrieve", "loaded", loaded * self._database.chunk_size)
        of_chunks = kinds[: loaded * shards : shards]
        tiers = TierChunks(of_chunks.count("memory"), of_chunks.count("disk"), of_chunks.count("pool"))
        missed = miss_reason(reason)
        return Loaded(
            loaded, missed if missed == "none" else self.history.explain(missed, run.names[loaded]), tiers
        )

    def outdated(self, run: ChunkRun) -> Literal["", "reset", "weights_unnamed"]:
        """Returns the reason if the run's label is not the engine's; otherwise an empty text."""
        return "" if self._version is None else self._version.why_not(run.label)

    def close(self, timeout: float) -> bool:
        """Stops new loads and stores, and waits up to `timeout` seconds for those under way. Returns False if
        it was closed before."""
        if self.closed:  # in a forked child, a thread that does not exist here may hold the lock
            return False
        with self._idle:
            if self.closed:
                return False
            self.closed = True
            if not self._idle.wait_for(lambda: not self._under_way, timeout):
                log.warning("%d cache operations outlived close()", self._under_way)
            return True

    # --- inside ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _moving(self) -> Iterator[bool]:
        """Makes `close` wait while bytes move. Yields False if the mover is closed already."""
        if self.closed:
            yield False
            return
        with self._idle:
            begun = not self.closed
            self._under_way += begun
        try:
            yield begun
        finally:
            with self._idle:
                self._under_way -= begun
                self._idle.notify_all()

    def _store_all(self, run: ChunkRun, end: End) -> list[StoreOutcome]:
        """Puts the objects that the backend lacks. Returns each object's outcome. An object that was not
        stored, for lack of memory or because its put failed, is not tried again."""
        statuses = self.backend.batched_wants(run.keys, end)
        self.metrics.outages("store", statuses)
        outcomes = [StoreOutcome.BEFORE if status is Status.OK else StoreOutcome.NOT for status in statuses]
        missing = [index for index, status in enumerate(statuses) if status is Status.MISSING]
        for index, status in zip(missing, self._put(run, missing, end), strict=False):
            if status is Status.OK:
                outcomes[index] = StoreOutcome.NEW
        if StoreOutcome.NEW in outcomes and not self._annotated:  # stores the namespace's manifest, too
            key, manifest = self._database.manifest_key, self._database.namespace.manifest()
            self._annotated = self.backend.annotate(key, manifest, end) is Status.OK
        return outcomes

    def _put(self, run: ChunkRun, missing: list[int], end: End) -> list[Status]:
        """Puts the objects with the indices `missing`. Returns a status for each, in order; fewer if there
        was no memory for the last objects."""
        outcomes: list[PutOutcome] = []
        done = 0
        while done < len(missing):
            # the first batch is one chunk, which is sent while the others are gathered
            indices = missing[done : done + (self.backend.batch_size if done else 1)]
            staged = self._gather(run, indices, end)
            if not staged:
                left = {index // run.shards for index in missing[done:]}
                self.metrics.trouble("store", "no_staging", len(left))
                break
            keys = [run.keys[index] for index in indices[: len(staged)]]
            outcomes.append(self.backend.batched_put(keys, staged, end))
            done += len(staged)
        statuses = [status for outcome in outcomes for status in outcome.results()]
        self.metrics.outages("store", statuses)
        return statuses

    def _gather(self, run: ChunkRun, indices: list[int], end: End) -> list[Staged]:
        """Stages the objects of `indices`, in order, as long as there is memory; none if no memory becomes
        free in time. Only the first waits for memory, so that two stores that hold memory never wait for each
        other. Each is sealed with the checksum of the engine's own bytes, so any change of the memory is
        detected."""
        staged: list[Staged] = []
        try:
            for _ in indices:
                memory = self.backend.stage(payload_bytes=self._payload_bytes, end=0.0 if staged else end)
                if memory is None:
                    break
                staged.append(memory)
            if not staged:
                return []
            with run.lend() as copiers:
                copied = _checksums(
                    copiers[index % run.shards].gather(*run.place(index, memory.payload))
                    for index, memory in zip(indices, staged, strict=False)
                )
            for index, memory, checksum in zip(indices, staged, copied, strict=False):
                memory.seal(run.keys[index], checksum)
        except BaseException:
            for memory in staged:
                memory.release()
            raise
        return staged

    def _scatter(self, run: ChunkRun, end: End) -> tuple[list[TierKind], str]:
        """Reads objects and scatters them, in order, up to the first that is missing or damaged. Returns the
        kind of each loaded object's tier, and why the next object was not loaded; `none` if all were loaded.

        The blocks of a damaged object count as not loaded. Its tier has removed the object, so the next load
        reads it from another tier.
        """
        kinds, size = list[TierKind](), self._payload_bytes
        fetching = self.backend.batched_fetch(run.keys, payload_bytes=size, end=end)
        with contextlib.closing(fetching) as fetches:
            for together in fetches:
                try:
                    if self.closed:
                        break
                    if end is not None and time.monotonic() >= end:
                        return kinds, "deadline"
                    payloads, reason = _leading(together)
                    copied, damaged = list[int](), False
                    if payloads:  # otherwise `lend` might raise, and hide the reason
                        with run.lend() as copiers:
                            copied = _checksums(
                                copiers[index % run.shards].scatter(*run.place(index, payload))
                                for index, payload in enumerate(payloads, len(kinds))
                            )
                    for fetched, checksum in zip(together, copied, strict=False):
                        # `check` removes a damaged object. Go on, so that it removes all of them
                        if damage := self.backend.check(fetched, checksum):
                            reason, damaged = damage, True
                        elif not damaged:
                            kinds.append(fetched.tier)
                    if reason:
                        return kinds, reason
                finally:
                    for fetched in together:
                        fetched.release()
        return kinds, "none" if len(kinds) == len(run.keys) else Status.CLOSED.value
