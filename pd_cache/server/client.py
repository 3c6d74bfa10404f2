"""The client of this host's cache server: `RemoteCache`, which takes chunk names and block ids, and the
lookup client over it.

`find`, `store` and `load` send a message (`protocol.py`) over the connection (`connection.py`, `link.py`),
and wait for its end in `UnderWay.wait`. In the server, `CacheServer._handle` (`server.py`) takes it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from pd_cache.chunks import (
    CacheMetadata,
    ChunkedTokenDatabase,
    ChunkNamer,
    ExtraKey,
    Names,
    Tokens,
    check_names,
)
from pd_cache.config import NodeSettings
from pd_cache.errors import CacheServerError
from pd_cache.layout import KVCaches, KVLayout, PageKind, layer_tensors
from pd_cache.lookup import LookupClient, only_at_hand
from pd_cache.metrics import CacheMetrics
from pd_cache.paged.base import BlocksOrSlots, plan_named
from pd_cache.reasons import Found, Loaded, MissReason, StoreOutcome, miss_reason
from pd_cache.server.connection import ServerConnection
from pd_cache.server.link import Context, Future
from pd_cache.server.memory import event_handle, record_event
from pd_cache.server.protocol import (
    Answer,
    EndSession,
    EngineIdentity,
    Lookup,
    Retrieve,
    Store,
    Stored,
)
from pd_cache.versions import FIRST, PRESENT, Versioned, WeightsVersion
from transfer.deadlines import Timeout

R = TypeVar("R")


class RemoteCache(Versioned):
    """A `BlockCache` (see there) over the connection of an engine rank. Thread-safe.

    Each operation has a twin that only begins it, for callers that must not wait.
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
        version: WeightsVersion | None = None,
    ) -> None:
        """Connects to the server at `url`, e.g. `ipc:///run/pd-cache.sock`.

        kind: a scheduler only looks up. context: a ZMQ context; None to create it here. If `identity` leaves
        the chunk size to the server, this waits up to `connect_timeout_s` for the server's answer. An
        operation without a time-out of its own is given up after `lookup_timeout_s` or `move_timeout_s`.
        version: the version of the engine's weights; by default that of its files. Raises the errors of
        `ServerConnection`.
        """
        self.version = version or WeightsVersion()
        self.metrics = metrics or CacheMetrics()
        self.connection = ServerConnection(url, context, kind, identity, connect_timeout_s=connect_timeout_s)
        self.chunk_size = self.connection.chunk_size
        self.block_size = identity.block_size
        self.blocks_per_chunk = self.chunk_size // self.block_size
        """Always a whole number: the server refuses an engine for which it is not."""
        self._namer = ChunkNamer(self.chunk_size, self.blocks_per_chunk)
        self._group = identity.layers
        self._lookup_timeout_s = lookup_timeout_s
        self._move_timeout_s = move_timeout_s
        self._tensors: list[torch.Tensor] = []
        self._layout: KVLayout | None = None
        self._chunk_bytes = 0

    @property
    def available(self) -> bool:
        """Whether the server is connected, and has the KV tensors if any were registered."""
        return self.connection.ready

    def register_kv_caches(self, kv_caches: KVCaches, kind: PageKind | None = None) -> None:
        """Lends the paged KV cache to the server: one tensor per layer, in layer order.

        CPU tensors move to shared memory, in place. `kind` is needed only if shapes fit two kinds
        (`KVLayout`). Raises ServerRefusedError, with the server's reason, if the server does not take the
        tensors, and SharingError if they cannot be shared.
        """
        tensors = layer_tensors(kv_caches)
        layout = KVLayout.from_tensors(tensors, kind, block_size=self.block_size)
        chunk_bytes = layout.chunk_bytes(self.chunk_size)
        self.connection.register(kv_caches, layout.kind)
        self._tensors, self._layout, self._chunk_bytes = tensors, layout, chunk_bytes

    def name_chunks(
        self, tokens: Tokens | None, hashes: Names | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """See `BlockCache.name_chunks`."""
        if (welcome := self.connection.welcome) is not None:
            self._namer.mode = welcome.hash_mode
        return self._namer.name_chunks(tokens, hashes, extra_keys)

    # --- operations that wait for their end -----------------------------------------------------------------

    def find(
        self, names: Names, *, chunks_at_hand: int = 0, session: str = "", timeout: Timeout = None
    ) -> Found:
        """Returns how many leading chunks the server's cache holds with every shard, and why it holds no
        more.

        The first `chunks_at_hand` chunks are not looked up and count as found. The server protects the found
        chunks from eviction until `session` has loaded them or ends. `timeout` (s) is `lookup_timeout_s` by
        default.
        """
        lookup = self.begin_lookup(names, chunks_at_hand=chunks_at_hand, session=session, timeout=timeout)
        return lookup.wait()

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
        """Stores the chunks that lie in `blocks` of the registered tensors. Returns the outcome of each.

        Waits until the server no longer reads the blocks, usually at most `timeout` (s), by default
        `move_timeout_s`. The other arguments are those of `BlockCache.store`. Raises ValueError for tensors
        that were not registered and for blocks that they do not have.
        """
        self._check(kv_caches)
        return self.begin_store(names, blocks, after=after, label=label, timeout=timeout).wait()

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
        """Loads chunks into `blocks` of the registered tensors, in order. Returns how many were loaded, and
        why the next chunk was not loaded.

        Waits until the server no longer writes to the blocks, usually at most `timeout` (s), by default
        `move_timeout_s`. The other arguments are those of `BlockCache.load`. Raises ValueError for tensors
        that were not registered and for blocks that they do not have.
        """
        self._check(kv_caches)
        return self.begin_retrieve(names, blocks, session=session, label=label, timeout=timeout).wait()

    # --- operations that only begin -------------------------------------------------------------------------

    def begin_lookup(
        self, names: Names, *, chunks_at_hand: int = 0, session: str = "", timeout: Timeout = None
    ) -> UnderWay[Found]:
        """Begins a lookup; arguments as for `find`."""
        check_names(names)
        at_hand = only_at_hand(names, chunks_at_hand, "none")
        first = at_hand.chunks
        sent: Future | Found | str
        if first == len(names):
            sent = at_hand
        elif not self.connection.ready:  # the server answers only registered clients
            sent = "server_lost"
        elif (label := self.version.state.label) is None:
            sent = "weights_unnamed"
        else:
            seconds = self._lookup_timeout_s if timeout is None else timeout
            sent = self.connection.link.request(Lookup(session, tuple(names), first, label), seconds)
        return UnderWay(self, "lookup", functools.partial(self._found, len(names), first), sent)

    def begin_store(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        *,
        session: str = "",
        after: Any = None,
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> UnderWay[list[StoreOutcome]]:
        """Begins to store; arguments as for `store`. The blocks must not change until the store has ended."""
        return self._begin(Store, self._stored, session, names, blocks, after, label, timeout)

    def begin_retrieve(
        self,
        names: Names,
        blocks: BlocksOrSlots,
        *,
        session: str = "",
        after: Any = None,
        label: str | None = PRESENT,
        timeout: Timeout = None,
    ) -> UnderWay[Loaded]:
        """Begins to load; arguments as for `load`. The server may write to the blocks until the load has
        ended."""
        return self._begin(Retrieve, self._loaded, session, names, blocks, after, label, timeout)

    def end(self, session: str) -> None:
        """Releases what a session protects. Does nothing if there is no such session."""
        self.connection.link.notify(EndSession(session))  # if the server is gone, there is nothing to release

    def mark(self) -> Any:
        """Returns a mark of the work that the calling thread has queued on the device so far.
        `store(after=…)` waits for this work."""
        if not self._tensors:
            raise ValueError("no KV tensors: call register_kv_caches first")
        return record_event(self._tensors[0])

    def close(self) -> None:
        """Takes the KV tensors back from the server, and disconnects. Idempotent."""
        self.connection.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _check(self, kv_caches: Any) -> None:
        """Raises ValueError for tensors that were not registered: the server copies only tensors that this
        engine lent to it."""
        if kv_caches is not None and [*map(id, layer_tensors(kv_caches))] != [*map(id, self._tensors)]:
            raise ValueError("kv_caches are not the tensors that were registered")

    def _begin(
        self,
        kind: type[Store] | type[Retrieve],
        read_answer: Callable[[int, str | None, Answer | str], R],
        session: str,
        names: Names,
        blocks: BlocksOrSlots,
        after: Any,
        label: str | None,
        timeout: Timeout,
    ) -> UnderWay[R]:
        """`read_answer` gets the number of chunks, their label and the answer; see `UnderWay`."""
        seconds = self._move_timeout_s if timeout is None else timeout
        label = self.label if label == PRESENT else label
        op, loads = ("store", False) if kind is Store else ("retrieve", True)
        if self._layout is None:
            raise ValueError("no KV tensors: call register_kv_caches first")
        tail = 0 if self._group is None else self._group.tail
        chunks = plan_named(names, blocks, self._layout, self.chunk_size, loads=loads, tail=tail)
        ids = [block for chunk in chunks for block in chunk.tolist()]
        self.metrics.tokens(op, "requested", len(names) * self.chunk_size)
        read = functools.partial(read_answer, len(names), label)
        why = self.version.why_not(label) if self.connection.ready else "server_lost"
        fence = self.connection.fence
        place = None if why else fence.admit(loads=loads)
        if place is None:
            return UnderWay(self, op, read, why or "busy")
        try:
            patience, handle = max(1, int(seconds * 1000)), event_handle(after)
            request = kind(session, tuple(names), tuple(ids), *place, patience, handle, label or FIRST)
            return UnderWay(self, op, read, self.connection.link.request(request, seconds), place, after)
        except BaseException:
            fence.give_up(*place)
            raise

    # --- what answers mean ----------------------------------------------------------------------------------

    def _found(self, chunks: int, first: int, answer: Answer | str) -> Found:
        """Returns the result of a lookup of `chunks` chunks; the chunks before `first` are at hand. Counts
        its tokens."""
        if not isinstance(answer, Found):
            return Found(first, first, self._failed("lookup", 1, answer))
        size = self.chunk_size
        self.metrics.counts.looked_up((chunks - first) * size, (answer.chunks - first) * size)
        return answer

    def _loaded(self, chunks: int, label: str | None, answer: Answer | str) -> Loaded:
        """Returns how many of `chunks` chunks of the weights version `label` were loaded. Counts them."""
        if not isinstance(answer, Loaded):
            return Loaded(0, self._failed("retrieve", chunks, answer))
        if outdated := self.version.why_not(label):
            return Loaded(0, self._failed("retrieve", chunks, outdated))
        self._count_moved("retrieve", "loaded", answer.chunks)
        if answer.chunks < chunks:  # the server counts which chunk failed for which reason
            self.metrics.trouble("retrieve", "not_loaded")
        return answer

    def _stored(self, chunks: int, label: str | None, answer: Answer | str) -> list[StoreOutcome]:
        """Returns the outcome of each chunk of a store. Counts them."""
        if not isinstance(answer, Stored):
            self._failed("store", chunks, answer)
            return [StoreOutcome.NOT] * chunks
        self._count_moved("store", "stored", answer.outcomes.count(StoreOutcome.NEW))
        # the server counts which chunk failed for which reason
        self.metrics.trouble("store", "not_stored", answer.outcomes.count(StoreOutcome.NOT))
        return [StoreOutcome(outcome) for outcome in answer.outcomes]

    def _failed(self, op: str, chunks: int, answer: Answer | str) -> MissReason:
        """Returns why there is no result. `answer` is a word that says why there is no answer, or an answer
        of the wrong type. Counts the failure."""
        word = answer if isinstance(answer, str) else "nonsense"
        self.metrics.trouble(op, word, chunks)
        reason = miss_reason(word)
        return reason if reason in ("deadline", "reset", "weights_unnamed") else "server_down"

    def _count_moved(self, op: str, outcome: str, chunks: int) -> None:
        self.metrics.moved(op, chunks * self._chunk_bytes, "" if self._group is None else self._group.layers)
        self.metrics.tokens(op, outcome, chunks * self.chunk_size)


class UnderWay(Generic[R]):
    """A lookup, load or store, under way until `query` returns True. The server may touch its blocks until
    then. For use by one thread."""

    def __init__(
        self,
        cache: RemoteCache,
        op: str,
        read_answer: Callable[[Answer | str], R],
        sent: Future | Answer | str,
        place: tuple[int, int] | None = None,
        event: object = None,
    ) -> None:
        """`read_answer` turns the answer, or the word that says why there is none, into the result, and
        counts it.

        `sent` is the future of the request; if nothing was sent, the answer or that word. `place`: the slot
        and the ticket of a load or store in the fence. `event` is kept alive, because the server opens it by
        its handle.
        """
        self._connection = cache.connection
        self._counts = cache.metrics.counts
        self._op = op
        self._read_answer = read_answer
        self._under_way: Future | None = None
        """None once the operation has ended. Then it has a result."""
        self._result: R | None = None
        self._place = place
        self._event = event
        if isinstance(sent, Future):
            self._under_way = sent
        else:
            self._result = read_answer(sent)

    def query(self) -> bool:
        """Checks, without waiting, whether it has ended. Returns True once it has, and the server cannot
        touch its blocks any more."""
        future = self._under_way
        if future is None:
            return True
        if future.answer is None and not self._connection.link.look(future):
            return False
        if self._place is not None and not self._connection.fence.revoke(*self._place):
            return False  # the connection was lost in the middle of a copy into the blocks
        self._under_way = self._event = None
        answer = future.answer
        assert answer is not None
        self._result = self._read_answer(answer.reason if isinstance(answer, CacheServerError) else answer)
        return True

    def wait(self) -> R:
        """Waits until `query` returns True. Returns the result. If an exception ends the wait, the operation
        is given up."""
        if self._under_way is not None:
            begun = time.perf_counter()
            try:
                self._connection.link.wait(self._under_way)
                while not self.query():
                    time.sleep(0.001)
            except BaseException:  # the blocks are the engine's again when this returns
                if self._place is not None:
                    self._connection.fence.give_up(*self._place)
                raise
            self._counts.took(self._op, time.perf_counter() - begun)
        assert self._result is not None
        return self._result


class ServerLookupClient(LookupClient):
    """Looks prompts up in the cache server of this host. The server protects the found chunks for the
    request."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        url: str,
        timeout_s: float,
        *,
        further: Sequence[CacheMetadata] = (),
        metrics: CacheMetrics | None = None,
        version: WeightsVersion | None = None,
    ) -> None:
        """Begins to connect. Lookups find nothing while no server is connected. Raises ValueError for a bad
        address.

        A lookup waits at most `timeout_s` for its answer. `further` are the model's other layer groups, if it
        has several. `version`: as in `RemoteCache`.
        """
        identity = EngineIdentity.of(metadata, config.cache, further)
        self._server = RemoteCache(url, identity, kind="scheduler", metrics=metrics, version=version)
        database = ChunkedTokenDatabase(metadata.namespace(config.cache))
        super().__init__(database, self._server.metrics, cache=self._server, timeout=timeout_s)

    def close(self) -> None:
        self._server.close()
