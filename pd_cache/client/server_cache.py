"""ServerCache: the cache of this host's cache server, in terms of chunk names and block ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from pd_cache.blocks import BlocksOrSlots, Restored, StoreOutcome, TierChunks
from pd_cache.client.connection import PendingMove, ServerConnection, failure_of
from pd_cache.client.identity import EngineIdentity
from pd_cache.groups import Surveyed
from pd_cache.layout import KVLayout, PageKind, layer_tensors
from pd_cache.metrics import CacheMetrics
from pd_cache.misses import MissReason, miss_reason
from pd_cache.paged import LeavingOut, leaving_out, plan_named
from pd_cache.tokens import ExtraKey, Tokens, check_names
from pd_cache.wire.channel import Context, Future
from pd_cache.wire.messages import Found, Loaded, Retrieve, Store, Stored
from pd_cache.wire.sharing import record_event


class ServerCache:
    """A `BlockCache` (see there) over the connection of one engine rank. Thread-safe.

    Each operation has a twin that only begins it and returns a pending object, for callers that must not wait. What the server cannot do
    is counted when the end of the operation is seen.
    """

    def __init__(
        self,
        url: str,
        identity: EngineIdentity,
        *,
        kind: Literal["scheduler", "worker"] = "worker",
        context: Context[Any] | None = None,
        connect_timeout_s: float = 10.0,
        lookup_timeout_s: float = 1.0,
        move_timeout_s: float = 15.0,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Connects to the server at `url`, e.g. `ipc:///run/pd-cache.sock`.

        kind: a scheduler only looks up. context: a ZMQ context to use, None to create one. If `identity` leaves the chunk size to the
        server, this waits up to `connect_timeout_s` for it. An operation without a timeout of its own is given up after
        `lookup_timeout_s` or `move_timeout_s`. Raises the errors of `ServerConnection`.
        """
        self.metrics = metrics or CacheMetrics()
        self.connection = ServerConnection(url, context, kind, identity, connect_timeout_s=connect_timeout_s)
        self._lookup_timeout_s = lookup_timeout_s
        self._move_timeout_s = move_timeout_s
        self._tensors: list[torch.Tensor] = []
        self._layout: KVLayout | None = None
        self._chunk_bytes = 0
        self._epoch: str | None = None

    @property
    def chunk_size(self) -> int:
        return self.connection.chunk_size

    @property
    def block_size(self) -> int:
        return self.connection.hello.block_size

    @property
    def blocks_per_chunk(self) -> int:
        """The number of the engine's blocks in a chunk."""
        return self.connection.blocks_per_chunk

    @property
    def epoch(self) -> str | None:
        return self._epoch

    @property
    def available(self) -> bool:
        """Whether the server is there, and has the KV tensors if any were registered."""
        return self.connection.ready

    def register_kv_caches(
        self, kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor], kind: PageKind | None = None
    ) -> None:
        """Lends the paged KV cache to the server: one tensor per layer, in layer order.

        CPU tensors move to shared memory, in place. `kind` is needed only if shapes fit two kinds (`KVLayout`). Raises RefusedError, with
        the server's reason, if it does not take them, and SharingError if they cannot be shared.
        """
        tensors = layer_tensors(kv_caches)
        layout = KVLayout.from_tensors(tensors, kind, block_size=self.block_size)
        chunk_bytes = layout.chunk_bytes(self.chunk_size)
        self.connection.register(kv_caches, layout.kind)
        self._tensors, self._layout, self._chunk_bytes = tensors, layout, chunk_bytes

    def name_chunks(
        self, tokens: Tokens | None, hashes: Sequence[bytes] | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        return self.connection.name_chunks(tokens, hashes, extra_keys)

    # --- operations that wait for their end ----------------------------------------------------------------------

    def lookup(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> int:
        return self.survey(names, at_hand=at_hand, session=session, timeout=timeout).chunks

    def survey(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> Surveyed:
        return self.begin_lookup(names, at_hand=at_hand, session=session, timeout=timeout).survey()

    def store(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        after: Any = None,
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> list[StoreOutcome]:
        self._check(kv_caches)
        pending = self.begin_store(names, blocks, after=after, epoch=epoch, timeout=timeout)
        pending.wait()
        return pending.outcomes

    def retrieve(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        session: str = "",
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> int:
        return self.restore(names, blocks, kv_caches=kv_caches, session=session, epoch=epoch, timeout=timeout).chunks

    def restore(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        session: str = "",
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> Restored:
        self._check(kv_caches)
        pending = self.begin_retrieve(names, blocks, session=session, epoch=epoch, timeout=timeout)
        pending.wait()
        return pending.restored

    # --- operations that only begin ------------------------------------------------------------------------------

    def begin_lookup(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> PendingLookup:
        """Begins a lookup; arguments as for `lookup`."""
        check_names(names)
        at_hand = min(max(at_hand, 0), len(names))
        if at_hand == len(names):
            return PendingLookup(self, None, at_hand, len(names))
        seconds = self._lookup_timeout_s if timeout is None else timeout
        return PendingLookup(self, self.connection.lookup(session, names, at_hand, seconds), at_hand, len(names))

    def begin_store(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        session: str = "",
        after: Any = None,
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> PendingStore:
        """Begins to store; arguments as for `store`. The blocks must stay as they are until it has ended."""
        move = self._move(Store, session, names, blocks, after, epoch, timeout)
        self.metrics.tokens("store", "requested", len(names) * self.chunk_size)
        return PendingStore(self, len(names), move)

    def begin_retrieve(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        session: str = "",
        after: Any = None,
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> PendingRetrieve:
        """Begins to load; arguments as for `retrieve`. The server may write to the blocks until it has ended."""
        move = self._move(Retrieve, session, names, blocks, after, epoch, timeout)
        self.metrics.tokens("retrieve", "requested", len(names) * self.chunk_size)
        return PendingRetrieve(self, len(names), move)

    def end(self, session: str) -> None:
        self.connection.end_session(session)

    def reset(self) -> str | None:
        """Begins a new epoch of the model's weights; see `LookupClient.reset`. Waits as long as four lookups may take."""
        return self.connection.reset(4 * self._lookup_timeout_s)

    def mark(self) -> Any:
        if not self._tensors:
            raise ValueError("no KV tensors: call register_kv_caches first")
        return record_event(self._tensors[0])

    def close(self) -> None:
        """Takes the KV tensors back from the server and disconnects. Idempotent."""
        self.connection.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _check(self, kv_caches: Any) -> None:
        """Raises ValueError for tensors other than those registered: a server copies only what it was lent."""
        if kv_caches is None:
            return
        tensors = layer_tensors(kv_caches)
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            raise ValueError("kv_caches are not the tensors that were registered")

    def _move(
        self,
        kind: type[Store] | type[Retrieve],
        session: str,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        after: Any,
        epoch: str | None,
        timeout: float | None,
    ) -> PendingMove:
        seconds = self._move_timeout_s if timeout is None else timeout
        layers = self.connection.hello.layers
        may_leave_out = leaving_out(loads=kind is Retrieve, keeps_tail=layers is not None and layers.tail > 0)
        ids = self._block_ids(names, blocks, may_leave_out=may_leave_out)
        return self.connection.move(kind, session, names, ids, after, seconds, epoch)

    def _block_ids(self, names: Sequence[bytes], places: BlocksOrSlots, *, may_leave_out: LeavingOut) -> list[int]:
        """Returns the ids of the blocks, -1 for one that is left out. Raises ValueError for places that do not fit."""
        if self._layout is None:
            raise ValueError("no KV tensors: call register_kv_caches first")
        chunks = plan_named(names, places, self._layout, self.chunk_size, may_leave_out=may_leave_out)
        found: list[int] = []
        for chunk in chunks:
            if chunk.blocks is None:
                raise ValueError("slot_mapping must be of whole blocks: a cache server moves nothing smaller")
            found += [max(block, -1) for block in chunk.blocks.tolist()]
        return found

    def note_epoch(self, epoch: str) -> None:
        """Takes in the epoch that an answer told; for the pending operations."""
        self._epoch = epoch

    def count_moved(self, op: Literal["retrieve", "store"], outcome: str, chunks: int) -> None:
        """Counts chunks that arrived; for the pending operations."""
        layers = self.connection.hello.layers
        self.metrics.moved(op, chunks * self._chunk_bytes, "" if layers is None else layers.layers)
        self.metrics.tokens(op, outcome, chunks * self.chunk_size)


def _server_reason(failure: str) -> MissReason:
    """Returns why nothing was found or loaded, if the server gave no proper answer. `failure` is what `failure_of` returns."""
    reason = miss_reason(failure)
    return reason if reason == "deadline" else "server_down"


class PendingLookup:
    """A lookup that was sent. For use by one thread."""

    __slots__ = ("_at_hand", "_cache", "_chunks", "_found", "_future")

    def __init__(self, cache: ServerCache, future: Future | None, at_hand: int, chunks: int) -> None:
        self._cache = cache
        self._future = future
        self._at_hand = at_hand
        self._chunks = chunks
        self._found = Surveyed(at_hand, at_hand) if future is None else None

    def query(self) -> int | None:
        """Looks without waiting. Returns the chunks found, or None while there is no answer."""
        if self._found is None:
            assert self._future is not None
            if not self._future.query():
                return None
            self._found = self._judge(self._future)
        return self._found.chunks

    def wait(self) -> int:
        """Returns the chunks found, those at hand included. Waits until the deadline at the latest."""
        return self.survey().chunks

    def survey(self) -> Surveyed:
        """Does the same as `wait`; see `LookupClient.survey`."""
        if self._found is None:
            assert self._future is not None
            with self._cache.metrics.timed("lookup"):
                self._found = self._judge(self._future)
        return self._found

    def _judge(self, future: Future) -> Surveyed:
        """Returns what the answer says. Without an answer, only the chunks at hand count as found."""
        reason = failure_of(future)
        answer = None if reason else future.result()
        metrics, size = self._cache.metrics, self._cache.chunk_size
        if not isinstance(answer, Found) or not self._at_hand <= answer.chunks <= answer.leading <= self._chunks:
            metrics.trouble("lookup", reason or "nonsense")
            return Surveyed(self._at_hand, self._at_hand, _server_reason(reason))
        metrics.tokens("lookup", "requested", (self._chunks - self._at_hand) * size)
        metrics.tokens("lookup", "hit", (answer.chunks - self._at_hand) * size)
        if answer.epoch is not None:
            self._cache.note_epoch(answer.epoch)
        return Surveyed(answer.chunks, answer.leading, answer.reason, answer.epoch)


class _PendingOperation:
    """A store or retrieve under way. For use by one thread."""

    _op: Literal["store", "retrieve"]

    def __init__(self, cache: ServerCache, chunks: int, move: PendingMove) -> None:
        self._cache = cache
        self._chunks = chunks
        self._move = move
        self._counted = False

    def query(self) -> bool:
        """Looks without waiting. Returns True once it has ended and its blocks are the engine's again."""
        if not self._move.query():
            return False
        if not self._counted:
            self._counted = True
            self._count()
        return True

    def wait(self) -> None:
        """Waits until `query` returns True. If an interrupt ends the wait, the operation is given up."""
        try:
            with self._cache.metrics.timed(self._op):
                self._move.wait()
        except BaseException:  # an interrupt: the blocks are the engine's again when this returns
            self.give_up()
            raise
        self.query()

    def give_up(self) -> None:
        """Returns when the server touches the blocks no more."""
        self._move.give_up()

    def _count(self) -> None:
        """Judges the answer and counts it, once."""
        raise NotImplementedError


class PendingRetrieve(_PendingOperation):
    """A retrieve under way. Its blocks may be written to until `query` returns True."""

    _op = "retrieve"
    loaded = 0
    """How many chunks, from the first, are in their blocks; known once the retrieve has ended."""
    restored = Restored(0)
    """The same, with the tiers that the chunks came from, and why not more were loaded."""

    def _count(self) -> None:
        answer, metrics = self._move.answer, self._cache.metrics
        if not isinstance(answer, Loaded) or answer.chunks > self._chunks:
            metrics.trouble("retrieve", self._move.failure or "nonsense", self._chunks)
            self.restored = Restored(0, _server_reason(self._move.failure))
            return
        self.loaded = answer.chunks
        self.restored = Restored(answer.chunks, answer.reason, TierChunks(answer.memory, answer.disk, answer.pool))
        self._cache.count_moved("retrieve", "loaded", self.loaded)
        if self.loaded < self._chunks:  # the server counts which chunk failed for which reason
            metrics.trouble("retrieve", "not_loaded")


class PendingStore(_PendingOperation):
    """A store under way. Its blocks must stay as they are until `query` returns True."""

    _op = "store"
    failure = ""
    """Why chunks were not stored, in a word; empty if all are there."""

    def __init__(self, cache: ServerCache, chunks: int, move: PendingMove) -> None:
        super().__init__(cache, chunks, move)
        self.outcomes = [StoreOutcome.NOT] * chunks
        """The outcome of each chunk; known once the store has ended."""

    def _count(self) -> None:
        answer, metrics = self._move.answer, self._cache.metrics
        if not isinstance(answer, Stored) or len(answer.outcomes) != len(self.outcomes):
            self.failure = self._move.failure or "nonsense"
            metrics.trouble("store", self.failure, len(self.outcomes))
            return
        self.outcomes = [StoreOutcome(outcome) for outcome in answer.outcomes]
        self._cache.count_moved("store", "stored", answer.stored)
        if answer.failed:  # the server counts which chunk failed for which reason
            self.failure = "not_stored"
            metrics.trouble("store", "not_stored", answer.failed)
