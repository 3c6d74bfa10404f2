"""ChunkMover: moves runs of chunks between a paged cache and a backend, for an engine's own cache and for a cache server.

Store and load are pipelines over the backend's memory: while one batch of chunks is on the network, the next is gathered or the last is
scattered.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator, Iterator
from typing import Literal, NamedTuple

import torch

from pd_cache.backends import PutOutcome, Staged, StorageBackend
from pd_cache.backends.base import TierKind
from pd_cache.backends.places import Place, Taken, wait_for
from pd_cache.blocks import Restored, StoreOutcome, TierChunks
from pd_cache.checksum import Digest
from pd_cache.deadline import Deadline
from pd_cache.epochs import last_word
from pd_cache.metrics import CacheMetrics
from pd_cache.misses import miss_reason
from pd_cache.paged import ChunkSlots, PagedCopier, PendingCopy
from pd_cache.tokens import ChunkedTokenDatabase
from transfer.errors import Status
from transfer.locks import Condition

log = logging.getLogger(__name__)

_PART_BYTES = 16 << 10
"""The least bytes of an object that are worth a transfer of their own, when objects are read layer by layer."""
_RETRIES = 6
"""How often one load reads a damaged object again: twice for each kind of tier, which removes an object that fails twice."""


class ChunkRun(NamedTuple):
    """Chunks of a prompt: the keys of their objects, the places of their tokens in a paged cache, and the copiers that move them."""

    keys: list[str]
    """Chunk by chunk, and within a chunk shard by shard."""
    chunks: list[ChunkSlots]
    copiers: list[PagedCopier]
    """One for each shard."""
    epoch: str = ""
    """The epoch of the keys (`pd_cache.epochs`). A store in another than the current one stores nothing."""

    def part(self, first: int, end: int) -> ChunkRun:
        """Returns the run of the chunks from `first` to before `end`."""
        shards = len(self.copiers)
        return self._replace(keys=self.keys[first * shards : end * shards], chunks=self.chunks[first:end])

    def gather(self, index: int, payload: torch.Tensor) -> PendingCopy:
        """Begins to copy into `payload` the tokens of the object whose key has this index."""
        chunk, shard = divmod(index, len(self.copiers))
        return self.copiers[shard].gather(self.chunks[chunk], payload)

    def scatter(self, index: int, payload: torch.Tensor) -> PendingCopy:
        """Begins to copy the object whose key has this index to the places of its tokens."""
        chunk, shard = divmod(index, len(self.copiers))
        return self.copiers[shard].scatter(self.chunks[chunk], payload)


def layer_parts(layers: int, payload_bytes: int) -> list[range]:
    """Returns which layers of a payload are read together: one, or several if a layer of a chunk is small."""
    together = min(layers, max(1, -(-_PART_BYTES * layers // payload_bytes)))
    return [range(first, min(first + together, layers)) for first in range(0, layers, together)]


class ChunkMover:
    """Moves runs of chunks between paged caches and a backend, in overlapping steps. Thread-safe.

    The caller keeps ownership of the backend. The backend's failures are counted and never raised. A copier's errors are raised to the
    caller, after all memory has been given back.
    """

    def __init__(self, backend: StorageBackend, database: ChunkedTokenDatabase, metrics: CacheMetrics) -> None:
        self.backend = backend
        self.metrics = metrics
        self._database = database
        self.epochs = backend.epochs.of(database.namespace.model)
        """The epochs of the model whose chunks move."""
        self._annotated = False
        self._closed = False
        self._under_way: Taken = set()
        self._idle = Condition()
        self._process = os.getpid()

    @property
    def loads_by_layers(self) -> bool:
        """Whether the backend can be read in parts; so can `load_by_layers`, if the copiers write planes."""
        return self.backend.reads_parts

    @property
    def closed(self) -> bool:
        """Whether it is closed. True in a forked child, too: the threads that move chunks do not exist there."""
        return self._closed or os.getpid() != self._process

    def store(self, run: ChunkRun, timeout: float | None = None) -> list[StoreOutcome]:
        """Stores the objects that the backend lacks. Returns the outcome of each chunk.

        `timeout` (s) bounds the whole call; without it, each transfer has the configured timeout.
        """
        outcomes, shards = self._store(run, timeout), len(run.copiers)
        if shards == 1:
            return outcomes
        return [StoreOutcome.together(outcomes[at : at + shards]) for at in range(0, len(outcomes), shards)]

    def load(self, run: ChunkRun, timeout: float | Deadline | None = None) -> Restored:
        """Loads chunks in order up to the first that is missing. Returns how many were loaded, from where, and why not more.

        None counts as loaded if the run's epoch is not known to be current at the end. `timeout` (s) bounds the whole call, but for the
        answer to that question; see `last_word`.
        """
        self.metrics.tokens("retrieve", "requested", self._tokens(run, len(run.keys)))
        with self._moving() as may_move, self.metrics.timed("retrieve"):
            if not run.keys:
                return Restored(0)
            if not may_move:
                return Restored(0, "not_asked")
            kinds: list[TierKind] = []
            deadline = Deadline.of(timeout)
            reason = self._get(run, deadline, kinds)
            if kinds and (outdated := self.outdated(run, deadline)):
                reason = outdated
                self.metrics.trouble("retrieve", reason, len(kinds))
                kinds.clear()
        objects, shards = len(kinds), len(run.copiers)
        loaded = objects // shards
        self.metrics.moved("retrieve", objects * self._payload_bytes(run), self._database.namespace.group)
        self.metrics.tokens("retrieve", "loaded", loaded * self._database.chunk_size)
        of_chunks = kinds[: loaded * shards : shards]
        tiers = TierChunks(of_chunks.count("memory"), of_chunks.count("disk"), of_chunks.count("pool"))
        return Restored(loaded, miss_reason(reason), tiers)

    def load_by_layers(self, run: ChunkRun, timeout: float | Deadline | None = None) -> Generator[int, None, Restored]:
        """Does what `load` does, layer by layer. Yields how many layers, from the first, have arrived for all chunks that can be had.

        Nothing that has arrived counts as loaded before the end: only then are checksums and the epoch known. What `load` retries, this
        reports as not loaded. Raises NotImplementedError without `loads_by_layers`.
        """
        self.metrics.tokens("retrieve", "requested", self._tokens(run, len(run.keys)))
        good, reason = 0, "none"
        with self._moving() as may_move, self.metrics.timed("retrieve"):
            if not run.keys:
                return Restored(0)
            if not may_move:
                return Restored(0, "not_asked")
            deadline = Deadline.of(timeout)
            good, reason = yield from self._get_by_layers(run, deadline)
            if reason != "none":
                self.metrics.trouble("retrieve", reason, len(run.keys) - good if reason == "deadline" else 1)
            if good and (outdated := self.outdated(run, deadline)):
                self.metrics.trouble("retrieve", outdated, good)
                good, reason = 0, outdated
        loaded = good // len(run.copiers)
        self.metrics.moved("retrieve", good * self._payload_bytes(run), self._database.namespace.group)
        self.metrics.tokens("retrieve", "loaded", loaded * self._database.chunk_size)
        self.metrics.tokens("retrieve", "by_layers", loaded * self._database.chunk_size)
        return Restored(loaded, miss_reason(reason), TierChunks(pool=loaded))

    def outdated(self, run: ChunkRun, deadline: Deadline | None = None) -> Literal["", "reset", "epoch_unknown"]:
        """Returns why the run's epoch cannot be taken for the current one; empty if it is that. `deadline` is the move's."""
        epoch = self.epochs.current(run.epoch, timeout=last_word(deadline))
        if epoch == run.epoch:
            return ""
        return "epoch_unknown" if epoch is None else "reset"

    def close(self, timeout: float) -> bool:
        """Begins no more moves, and waits up to `timeout` seconds for those under way. Returns False if it was closed before."""
        if self.closed:  # in a forked child, a thread that does not exist here may hold the lock
            return False
        with self._idle:
            if self._closed:
                return False
            self._closed = True
            if not wait_for(self._idle, lambda: not self._under_way, timeout):
                log.warning("%d cache operations outlived close()", len(self._under_way))
            return True

    # --- inside --------------------------------------------------------------------------------------------------

    def _payload_bytes(self, run: ChunkRun) -> int:
        return run.copiers[0].layout.chunk_bytes(self._database.chunk_size)

    def _tokens(self, run: ChunkRun, objects: int) -> int:
        """Returns how many tokens this many objects of a run hold."""
        return objects * self._database.chunk_size // len(run.copiers)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[bool]:
        """Keeps `close` waiting while bytes move. Yields False if the mover is closed already.

        What is under way is counted by the objects that stand for it: an interrupt at any point of this function loses none.
        """
        place = None
        try:
            if not self.closed:
                with self._idle:
                    if not self._closed:
                        place = Place(self._under_way)
            yield place is not None
        finally:
            if place is not None:
                with self._idle:
                    place.release()
                    self._idle.notify_all()

    def _store(self, run: ChunkRun, timeout: float | None) -> list[StoreOutcome]:
        """Returns the outcome of each object."""
        deadline = Deadline(timeout)
        outcomes = [StoreOutcome.NOT] * len(run.keys)
        self.metrics.tokens("store", "requested", self._tokens(run, len(run.keys)))
        with self._moving() as may_move, self.metrics.timed("store"):
            if not run.keys or not may_move:
                return outcomes
            if self.outdated(run, deadline) == "reset":
                self.metrics.trouble("store", "reset", len(run.keys))
                return outcomes
            statuses = self.backend.batched_wants(run.keys, timeout=deadline.left())
            self.metrics.outages("store", statuses)
            missing = [index for index, status in enumerate(statuses) if status is Status.MISSING]
            for index, status in enumerate(statuses):
                if status is Status.OK:
                    outcomes[index] = StoreOutcome.BEFORE
            for index, status in zip(missing, self._put(run, missing, deadline), strict=False):
                if status is Status.OK:
                    outcomes[index] = StoreOutcome.NEW
            stored = outcomes.count(StoreOutcome.NEW)
            if stored:
                self._annotate(deadline)
        self.metrics.moved("store", stored * self._payload_bytes(run), self._database.namespace.group)
        self.metrics.tokens("store", "stored", self._tokens(run, stored))
        return outcomes

    def _put(self, run: ChunkRun, missing: list[int], deadline: Deadline) -> list[Status]:
        """Returns one status for each of the `missing`, in order; fewer if there was no memory for the last ones."""
        outcomes: list[PutOutcome] = []
        done = 0
        while done < len(missing):
            # one chunk first: it is on its way while the others are gathered
            indices = missing[done : done + (self.backend.batch_size if done else 1)]
            staged = self._gather(run, indices, deadline)
            if not staged:
                self.metrics.trouble("store", "no_staging", len(missing) - done)
                break
            keys = [run.keys[index] for index in indices[: len(staged)]]
            outcomes.append(self.backend.batched_put(keys, staged, timeout=deadline.left()))
            done += len(staged)
        statuses = [status for outcome in outcomes for status in outcome.results()]
        self.metrics.outages("store", statuses)
        return statuses

    def _gather(self, run: ChunkRun, indices: list[int], deadline: Deadline) -> list[Staged]:
        """Stages the objects of `indices`, from the first, as far as there is memory. Stages none only if no memory became free in time.

        Only the first object waits for memory, so that two stores that hold some never wait for each other. Each object is sealed with the
        checksum of what the engine has, so that any change of the memory is detected.
        """
        staged: list[Staged] = []
        copies: list[PendingCopy] = []
        size = self._payload_bytes(run)
        try:
            for index in indices:
                memory = self.backend.stage(payload_bytes=size, timeout=0.0 if staged else deadline.left())
                if memory is None:
                    break
                staged.append(memory)
                copies.append(run.gather(index, torch.frombuffer(memory.payload, dtype=torch.uint8)))
            for index, copy, memory in zip(indices, copies, staged, strict=False):
                memory.seal(run.keys[index], copy.wait())
        except BaseException:
            for copy in copies:  # the memory may still be written to
                copy.wait()
            for memory in staged:
                memory.release()
            raise
        return staged

    def _get(self, run: ChunkRun, deadline: Deadline, kinds: list[TierKind]) -> str:
        """Scatters objects in order up to the first that is missing. Returns why not more; `none` if all were scattered.

        Adds to `kinds` the kind of tier that each one came from.

        An object that turns out to be damaged is read again: its tier has removed it, and another tier may have a good one. After that,
        two objects are read together, then four, so that much damage does not mean much reading ahead in vain. The places that a damaged
        object was scattered to are not loaded, whatever they hold.
        """
        loaded, failures, together, known = 0, 0, len(run.keys), ""
        while loaded < len(run.keys):
            end = min(loaded + together, len(run.keys))
            placed, reason, damaged = self._place(run, loaded, end, deadline, kinds)
            loaded += placed
            if placed:
                failures, known = 0, ""
            if reason and not (
                known and reason in (known, Status.MISSING.value)
            ):  # it is no other trouble that it is gone now
                self.metrics.trouble("retrieve", reason, len(run.keys) - loaded if reason == "deadline" else 1)
            if damaged:
                failures += 1
                known = reason
                together = 1
                if failures > _RETRIES:
                    return reason
            elif loaded < end:
                return known or reason or Status.CLOSED.value
            else:
                together *= 2
        return "none"

    def _get_by_layers(self, run: ChunkRun, deadline: Deadline) -> Generator[int, None, tuple[int, str]]:
        """Returns how many objects, from the first, are good, and why not more. See `load_by_layers`."""
        size, layout = self._payload_bytes(run), run.copiers[0].layout
        parts = layer_parts(layout.layers, size)
        planes = layout.planes // layout.layers
        ends = [part.stop * size // layout.layers for part in parts]
        digests = [Digest() for _ in run.keys]
        checked, alive, reason, arrived = 0, len(run.keys), "none", 0
        fetching = self.backend.batched_get_parts(run.keys, ends, timeout=deadline.left())
        with contextlib.closing(fetching) as parts_of_keys:
            for fetched in parts_of_keys:
                if self._closed or deadline.passed:
                    return 0, "not_asked" if self._closed else "deadline"
                if fetched.part > arrived:
                    arrived = fetched.part
                    yield parts[arrived].start
                if fetched.payload is None:
                    alive, reason = fetched.place, fetched.reason
                    continue
                chunk, shard = divmod(fetched.place, len(run.copiers))
                part, digest = parts[fetched.part], digests[fetched.place]
                run.copiers[shard].scatter_planes(
                    run.chunks[chunk],
                    range(part.start * planes, part.stop * planes),
                    torch.frombuffer(fetched.payload, dtype=torch.uint8),
                    digest,
                )
                if fetched.check is not None and fetched.place == checked < alive:
                    if damage := fetched.check(digest.intdigest()):
                        alive, reason = fetched.place, damage
                    else:
                        checked += 1
                if fetched.place == alive - 1 and fetched.part >= arrived:  # the last one that can be had
                    arrived = fetched.part + 1
                    yield part.stop
        yield layout.layers
        return checked, reason

    def _place(
        self, run: ChunkRun, first: int, end: int, deadline: Deadline, kinds: list[TierKind]
    ) -> tuple[int, str, bool]:
        """Reads and scatters the objects with the indices from `first` to before `end`.

        Returns how many were scattered, why not more, and whether that is because the next object was damaged.
        """
        placed = 0
        keys = run.keys[first:end]
        fetching = self.backend.batched_get(keys, payload_bytes=self._payload_bytes(run), timeout=deadline.left())
        with contextlib.closing(fetching) as fetches:
            for index, fetched in zip(range(first, end), fetches, strict=True):
                try:
                    if self._closed:
                        break
                    if deadline.passed:
                        return placed, "deadline", False
                    if fetched.payload is None:
                        return placed, fetched.reason, False
                    # wait immediately: meanwhile the transfers behind this chunk run ahead. A reader that holds no
                    # memory while it waits for the next chunk can never block another reader.
                    copied = run.scatter(index, torch.frombuffer(fetched.payload, dtype=torch.uint8)).wait()
                    if reason := fetched.check(copied):
                        return placed, reason, True
                    placed += 1
                    kinds.append(fetched.tier)
                finally:
                    fetched.release()
        return placed, "", False

    def _annotate(self, deadline: Deadline) -> None:
        """Stores the namespace's manifest beside its chunks, once."""
        if not self._annotated:
            key, manifest = self._database.manifest_key, self._database.namespace.manifest()
            self._annotated = self.backend.annotate(key, manifest, timeout=deadline.left()) is Status.OK
