"""Lookups: find the longest contiguous prefix of a prompt that a pool or an engine holds.

A scheduler calls `LookupClient.find`, which never raises. It calls `PrefixLookup.find`, or `RemoteCache.find`
(`server/client.py`) with a cache server. `PrefixLookup` makes the keys and asks `batched_contains` of the
tiers (`tiers/mooncake.py`, `tiers/hybrid.py`), or of the pool alone (`transfer/store.py`). Then
`count_found` turns the statuses into the length of the prefix.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pd_cache.chunks import (
    CacheMetadata,
    ChunkedTokenDatabase,
    ExtraKey,
    Keys,
    Names,
    Namespace,
    Tokens,
    check_names,
)
from pd_cache.config import NodeSettings
from pd_cache.groups import LayerGroups, longest_prefix
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import ChunkHistory, Found, MissReason, TierChunks
from pd_cache.versions import Versioned, WeightsVersion
from transfer.deadlines import End, Timeout, end_in
from transfer.errors import Status
from transfer.store import MooncakeStore

if TYPE_CHECKING:
    from pd_cache.cache import BlockCache

_RENEWED = 1 << 14
"""The most keys in one request to the master that renews leases. Such a request takes 7 to 9 ms."""

closed_in_child: weakref.WeakSet[Any] = weakref.WeakSet()
"""Lookups, movers and caches of objects. A forked child has none of their threads, so they are `closed`
there."""


def _close_in_child() -> None:
    for closing in closed_in_child:
        closing.closed = True


os.register_at_fork(after_in_child=_close_in_child)


def only_at_hand(names: Names, chunks_at_hand: int, reason: MissReason) -> Found:
    """Returns a `Found` with only the chunks at hand. Its reason is `reason`, unless all chunks are at
    hand."""
    first = min(max(chunks_at_hand, 0), len(names))
    return Found(first, first, "none" if first == len(names) else reason)


class LookupClient:
    """Finds prefixes: `lookup` counts in tokens, `find` in chunks. An error is counted, and the lookup then
    finds nothing beyond what is at hand."""

    def __init__(
        self,
        database: ChunkedTokenDatabase,
        metrics: CacheMetrics | None = None,
        *,
        cache: PrefixLookup | BlockCache | None = None,
        timeout: Timeout = None,
    ) -> None:
        """`database` names the chunks, and `cache` finds them; without a cache, lookups find nothing. A
        lookup waits at most `timeout` seconds for its answer; None leaves this to `cache`."""
        self.metrics = metrics or CacheMetrics()
        self._database = database
        self._cache = cache
        self._timeout = timeout

    @property
    def available(self) -> bool:
        """False while the process that answers lookups is known to be unreachable. Every lookup is then a
        miss at once."""
        return self._cache is not None and self._cache.available

    def lookup(
        self,
        token_ids: Tokens | None = None,
        lookup_id: str | None = None,
        request_configs: Mapping[str, Any] | None = None,
        *,
        block_hashes: Names | None = None,
        at_hand: int = 0,
    ) -> int:
        """Returns the end of the longest contiguous prefix found, in tokens; 0 for a prompt that cannot be
        named.

        Takes either `token_ids` or, in hash mode, the engine's `block_hashes`. `request_configs` may hold
        `extra_keys`: the request's isolation (cache_salt, LoRA name, multi-modal hashes). Whole chunks among
        the first `at_hand` tokens are not looked up, and count as found. `lookup_id`: see `find`.
        """
        configs = dict(request_configs or {})
        try:
            extra_keys: Iterable[ExtraKey] = configs.pop("extra_keys", ())
            if configs:
                raise ValueError(f"unknown request_configs {sorted(configs)}; expected only extra_keys")
            names = self._database.name_chunks(token_ids, block_hashes, extra_keys)
        except Exception as error:  # noqa: BLE001 - a lookup never fails its request
            self._count(error, lookup_id)
            return 0
        size = self._database.chunk_size
        return self.find(names, lookup_id, chunks_at_hand=at_hand // size).chunks * size

    def find(self, names: Names, lookup_id: str | None = None, *, chunks_at_hand: int = 0) -> Found:
        """Returns how many leading chunks of a prompt were found, and why no more.

        The first `chunks_at_hand` chunks are not looked up, and count as found. `lookup_id` names the request
        in log lines. A client that protects found chunks does so under this id, until the prefix is loaded or
        until `end`.
        """
        reason: MissReason = "not_asked"
        if self._cache is not None:
            try:
                return self._cache.find(
                    names, chunks_at_hand=chunks_at_hand, session=lookup_id or "", timeout=self._timeout
                )
            except Exception as error:  # noqa: BLE001 - a lookup never fails its request
                self._count(error, lookup_id)
                reason = "error"
        return only_at_hand(names, chunks_at_hand, reason)

    def reset(self, version: str | None = None) -> None:
        """Notes that the engine's weights have changed. `version` is their label: up to 64 letters, digits,
        dots, dashes and underscores.

        Engines with equal labels share chunks, so give equal labels only to equal weights. Without a label,
        the engine finds, loads and stores nothing until it gets one. Raises ValueError for text that cannot
        be a label.
        """
        if self._cache is not None:
            self._cache.version.reset(version)

    def stored(self, names: Names) -> None:
        """Notes that the engine has stored these chunks. If a later lookup does not find them, they count as
        evicted. A cache server knows what it has stored, and needs no note."""
        if isinstance(self._cache, PrefixLookup) and self._cache.history is not None:
            self._cache.history.note(names)

    def end(self, lookup_id: str) -> None:
        """Releases the chunks that lookups with this id protect. Call it when the request is over."""
        if self._cache is not None:
            self._cache.end(lookup_id)

    def renew(self, names: Names) -> tuple[str, int] | None:
        """Protects the objects of these chunks, in all layer groups, from eviction for another lease, if the
        pool has them.

        Returns the weights' label and how many objects the pool is known to have. Returns None if there is no
        label, the pool does not answer, or a cache server answers the lookups.
        """
        cache, found = self._cache, 0
        if not isinstance(cache, PrefixLookup) or (label := cache.label) is None:
            return None
        # `batched_contains` does not ask the pool for keys that a local tier has
        ask = getattr(cache.backend, "batched_wants", cache.backend.batched_contains)
        step = max(1, _RENEWED // cache.groups.keys_per_chunk)
        for start in range(0, len(names), step):
            statuses = ask(cache.groups.keys(names[start : start + step], label))
            if not {Status.OK, Status.MISSING}.intersection(statuses):
                return None
            found += statuses.count(Status.OK)
        return label, found

    def supports_producer_reuse(self) -> bool:
        """Returns whether prefill nodes, too, may look up and reuse chunks."""
        return True

    def close(self) -> None:
        """Ends the lookups, and releases what the client opened itself. Idempotent."""
        self._cache = None

    def _count(self, error: Exception, lookup_id: str | None) -> None:
        self.metrics.trouble(
            "lookup", f"error_{type(error).__name__}", detail=f"{lookup_id or 'a lookup'}: {error}"
        )


class HoldsKeys(Protocol):
    """Tiers (`StorageBackend`), or the pool alone (`MooncakeStore`): reports which keys are there."""

    @property
    def available(self) -> bool: ...

    def batched_contains(self, keys: Keys, end: End = None) -> list[Status]: ...


class PrefixLookup(Versioned):
    """Looks up all chunks of a prompt, in all layer groups, with one request. Thread-safe."""

    def __init__(
        self,
        groups: LayerGroups,
        backend: HoldsKeys,
        version: WeightsVersion | None = None,
        metrics: CacheMetrics | None = None,
        history: ChunkHistory | None = None,
    ) -> None:
        """Looks up chunks of the weights version `version`, by default that of the engine's files. `history`
        remembers found chunks, so that a later miss of such a chunk is known as an eviction."""
        self.groups = groups
        self.backend = backend
        self.version = version or WeightsVersion()
        self.metrics = metrics or CacheMetrics()
        self.history = history
        self.closed = False
        """Set by the owner, and in a forked child: lookups then find nothing, and do not ask the backend."""
        closed_in_child.add(self)

    @property
    def available(self) -> bool:
        """False while the pool is known to be down. Lookups are then misses, and stores are dropped, at
        once."""
        return self.backend.available

    def find(
        self, names: Names, *, chunks_at_hand: int = 0, session: str = "", timeout: Timeout = None
    ) -> Found:
        """Returns how many leading chunks the tiers hold, and why no more; see `BlockCache.find`. A lookup
        protects nothing here, so `session` has no effect. Raises ValueError for names that no chunk can have.
        """
        check_names(names)
        at_hand = only_at_hand(names, chunks_at_hand, "not_asked")
        if (first := at_hand.chunks) == len(names) or self.closed:
            return at_hand
        label = self.version.state.label
        if label is None:
            self.metrics.counts.looked_up((len(names) - first) * self.groups.first.chunk_size, 0)
            self.metrics.trouble("lookup", "weights_unnamed")
            return only_at_hand(names, first, "weights_unnamed")
        keys = self.groups.keys(names[first:], label)
        begun = time.perf_counter()
        statuses = self.backend.batched_contains(keys, end_in(timeout))
        self.metrics.counts.took("lookup", time.perf_counter() - begun)
        return count_found(self, names, first, statuses, label)

    def end(self, session: str) -> None:
        """Does nothing: only a cache server protects what a session has found."""


def count_found(
    lookup: PrefixLookup, names: Names, first: int, statuses: Sequence[Status], label: str
) -> Found:
    """Returns how many leading chunks were found, and why no more. Counts their tokens.

    `statuses` are those of the chunks from `first` on, in the order of `LayerGroups.keys`, in the weights
    version `label`. The chunks before `first` are at hand.
    """
    groups, history, asked = lookup.groups, lookup.history, names[first:]
    size, found = groups.first.chunk_size, longest_prefix(groups, statuses)
    lookup.metrics.counts.looked_up(len(asked) * size, found.chunks * size)
    reason, tiers = found.reason, TierChunks()
    if reason != "none":
        lookup.metrics.outages("lookup", statuses)
    if history is not None:
        history.follow(label)
        if reason != "none":
            reason = history.explain(reason, asked[found.chunks])
        # if all groups have a tail, only the end of a prefix is known to be there
        history.note(asked[0 if groups.need_all else max(0, found.leading - 1) : found.leading])
    if near := getattr(lookup.backend, "near", None):  # only a backend with local tiers has it
        tiers = near(groups.first.keys(asked[: found.chunks], (0,), label))
    return Found(first + found.chunks, first + found.leading, reason, tiers)


class MooncakeLookupClient(LookupClient):
    """Looks up all chunks and shards, in all layer groups, with one `batch_is_exist`."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata | Namespace,
        master_addr: str,
        *,
        further: Sequence[CacheMetadata | Namespace] = (),
        metrics: CacheMetrics | None = None,
        history: ChunkHistory | None = None,
        version: WeightsVersion | None = None,
    ) -> None:
        """Begins to connect to the master at `master_addr` (`host:port`); lookups find nothing until it
        answers.

        `metadata` is the engine's metadata or its namespace. `further` are those of the model's other layer
        groups. With a `history`, the client distinguishes evicted chunks from chunks that were never stored;
        without it, both are `missing`. `version`: see `PrefixLookup`.
        """
        spaces = (
            given if isinstance(given, Namespace) else given.namespace(config.cache)
            for given in (metadata, *further)
        )
        groups = LayerGroups([ChunkedTokenDatabase(space) for space in spaces])
        self.store = MooncakeStore(config.transfer, master=master_addr, host=config.host, segment_size=0)
        prefix = PrefixLookup(groups, self.store, version, metrics, history)
        super().__init__(groups.first, prefix.metrics, cache=prefix)

    def close(self) -> None:
        self.store.close()


class BypassLookupClient(LookupClient):
    """Calls `engine.find` directly. The caller keeps ownership of the engine."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        engine: PrefixLookup,
        *,
        timeout: Timeout = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """`engine` is a `CacheEngine`, or a `PrefixLookup` alone. `timeout` (s) bounds each lookup. Raises
        ValueError if the namespace of `config` and `metadata` is not the engine's."""
        wanted, database = metadata.namespace(config.cache), engine.groups.first
        if database.namespace != wanted:
            raise ValueError(f"the engine serves {database.namespace}, the client was made for {wanted}")
        super().__init__(database, metrics, cache=engine, timeout=timeout)
