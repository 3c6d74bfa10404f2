"""Lookups: the longest contiguous prefix of a prompt that a pool or an engine holds, and the clients that need no cache server."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Namespace, Tokens, check_names
from pd_cache.config import NodeSettings
from pd_cache.groups import LayerGroups
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import ChunkHistory, Found, MissReason, TierChunks, worst_reason
from pd_cache.versions import WeightsVersion
from transfer.errors import Status
from transfer.store import MooncakeStore

_RENEWED = 1 << 14
"""How many leases one request renews. It takes 7 to 9 ms."""


class LooksUp(Protocol):
    """What a lookup client asks: a cache, the engines of a model's layer groups together, or the pool itself."""

    def find(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> Found:
        """Returns how long a prefix is; see `BlockCache.find`."""

    @property
    def available(self) -> bool:
        """False while it is known that nothing can be found."""

    def reset(self, version: str | None = None) -> None:
        """Notes that the engine has other weights now; see `LookupClient.reset`."""


class Engine(LooksUp, Protocol):
    """The same of a `CacheEngine` or an `EngineLookup`."""

    database: ChunkedTokenDatabase


class LookupClient(ABC):
    """Finds prefixes, in tokens. Counts any error; the result is then what is already at hand."""

    def __init__(self, database: ChunkedTokenDatabase, metrics: CacheMetrics | None = None) -> None:
        """`database` names the chunks."""
        self.metrics = metrics or CacheMetrics()
        self._database = database
        self._asks: LooksUp | None = None
        """What this client asks; None once there is nothing to ask."""
        self._timeout: float | None = None
        """How long it waits for an answer, in seconds; None for as long as is usual there."""

    @property
    def available(self) -> bool:
        """False while the process that answers lookups is known to be unreachable: every lookup is then an immediate miss."""
        return self._asks is not None and self._asks.available

    def lookup(
        self,
        token_ids: Tokens | None = None,
        lookup_id: str | None = None,
        request_configs: Mapping[str, Any] | None = None,
        *,
        block_hashes: Sequence[bytes] | None = None,
        at_hand: int = 0,
    ) -> int:
        """Returns the end of the longest contiguous prefix found, in tokens; 0 for a prompt that cannot be named.

        Takes either `token_ids` or, in hash mode, the engine's `block_hashes`. `request_configs` may hold `extra_keys`: the request's
        isolation (cache_salt, LoRA name, multi-modal hashes). The other arguments are those of `find`.
        """
        try:
            names = self._database.name_chunks(token_ids, block_hashes, _extra_keys(request_configs))
        except Exception as error:  # noqa: BLE001 - a lookup never fails its request
            self._count(error, lookup_id)
            return 0
        return self.find(names, lookup_id, at_hand=at_hand).chunks * self._database.chunk_size

    def find(self, names: Sequence[bytes], lookup_id: str | None = None, *, at_hand: int = 0) -> Found:
        """Returns how many chunks, from the first, are found of a prompt whose chunks are already named, and why not more.

        Whole chunks among the first `at_hand` tokens are not looked up, and count as found. `lookup_id` names the request in log lines. If
        a lookup protects what it found, it does so for that id, until the prefix is loaded or until `end`.
        """
        chunks = min(max(at_hand, 0) // self._database.chunk_size, len(names))
        if chunks == len(names):
            return Found(chunks, chunks)
        if self._asks is None:
            return Found(chunks, chunks, "not_asked")
        try:
            return self._asks.find(names, at_hand=chunks, session=lookup_id or "", timeout=self._timeout)
        except Exception as error:  # noqa: BLE001 - a lookup never fails its request
            self._count(error, lookup_id)
            return Found(chunks, chunks, "error")

    def reset(self, version: str | None = None) -> None:
        """Notes that the engine has other weights now, those of `version`: up to 64 letters, digits, dots, dashes and underscores.

        Engines share what they store exactly if their versions are equal, so give equal ones for equal weights only. Without a `version`, the
        engine finds, loads and stores nothing until it gets one. Raises ValueError for a label that cannot be one.
        """
        if self._asks is not None:
            self._asks.reset(version)

    def stored(self, names: Sequence[bytes]) -> None:  # noqa: B027 - only some clients keep a history
        """Notes that the engine has stored these chunks, so that they count as evicted if a later lookup does not find them."""

    def end(self, lookup_id: str) -> None:  # noqa: B027 - only some clients protect anything
        """Releases what the lookups of this id protect. Call it when the request is over."""

    def renew(self, names: Sequence[bytes]) -> tuple[str, int] | None:
        """Keeps the objects of these chunks, in all groups of layers, from eviction for another lease, as far as the pool has them.

        Returns the weights' label and how many objects the pool has. None if one of them is not known, or if this client has no pool.
        """
        return None

    def supports_producer_reuse(self) -> bool:
        """Returns whether prefill nodes, too, may look up and reuse chunks."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Releases what the client opened itself. Idempotent."""

    def _count(self, error: Exception, lookup_id: str | None) -> None:
        self.metrics.trouble("lookup", f"error_{type(error).__name__}", detail=f"{lookup_id or 'a lookup'}: {error}")


def _extra_keys(request_configs: Mapping[str, Any] | None) -> Iterable[ExtraKey]:
    if not request_configs:
        return ()
    unknown = set(request_configs) - {"extra_keys"}
    if unknown:
        raise ValueError(f"unknown request_configs {sorted(unknown)}; expected only extra_keys")
    extra_keys: Iterable[ExtraKey] = request_configs["extra_keys"]
    return extra_keys


class PrefixLookup:
    """Finds out from the statuses of keys how long a prefix is, in all groups of layers, and counts its tokens."""

    def __init__(
        self,
        groups: LayerGroups,
        metrics: CacheMetrics,
        history: ChunkHistory | None = None,
        near: Callable[[Sequence[str]], TierChunks] | None = None,
    ) -> None:
        """`history` learns what is found, and says of what is missing whether it was there before. Without it, no lookup knows. `near`: see
        `StorageBackend`."""
        self.groups = groups
        self.metrics = metrics
        self._history = history
        self._near = near

    def judge(self, names: Sequence[bytes], at_hand: int, statuses: Sequence[Status], label: str) -> Found:
        """Returns how many of the first chunks were found, and why not more. Counts their tokens.

        `statuses` are those of the chunks after the first `at_hand`, in the order of `LayerGroups.keys`, in the weights version `label`.
        """
        chunks, size, metrics = len(names), self.groups.first.chunk_size, self.metrics
        metrics.tokens("lookup", "requested", (chunks - at_hand) * size)
        if statuses.count(Status.OK) == len(statuses) and not self.groups.ahead:
            found = Found(chunks - at_hand, chunks - at_hand)
        else:
            found = self.groups.reach([status is Status.OK for status in statuses])
            metrics.outages("lookup", statuses)
        metrics.tokens("lookup", "hit", found.chunks * size)
        if self._history is not None:
            self._history.follow(label)
        reason = self._reason(names[at_hand:], found, statuses)
        if self._history is not None:
            # of groups that all have a tail, only the end of a prefix is known to be there
            first = 0 if self.groups.need_all else max(0, found.leading - 1)
            self._history.note(names[at_hand + first : at_hand + found.leading])
        near = TierChunks()
        if self._near is not None:
            near = self._near(self.groups.first.keys(names[at_hand : at_hand + found.chunks], label=label))
        return Found(at_hand + found.chunks, at_hand + found.leading, reason, near)

    def _reason(self, names: Sequence[bytes], found: Found, statuses: Sequence[Status]) -> MissReason:
        """Returns why the first chunk that was not found was not there."""
        if found.leading > found.chunks:
            worst = worst_reason(statuses)
            return "no_tail" if worst == "missing" else worst
        if found.chunks == len(names):
            return "none"
        reason = worst_reason(self.groups.of_chunk(statuses, found.chunks))
        return reason if self._history is None else self._history.explain(reason, names[found.chunks])


class PoolLookup(PrefixLookup):
    """Looks up all chunks of a prompt, in all groups of layers, with one request."""

    def __init__(
        self,
        groups: LayerGroups,
        exists: Callable[..., list[Status]],
        version: WeightsVersion,
        metrics: CacheMetrics,
        history: ChunkHistory | None = None,
        near: Callable[[Sequence[str]], TierChunks] | None = None,
    ) -> None:
        """`exists(keys, timeout=…)` returns the statuses of keys. `version`: the weights version to look in."""
        super().__init__(groups, metrics, history, near)
        self._exists = exists
        self._version = version

    @property
    def closed(self) -> bool:
        """Whether there is nothing to ask any more."""
        return False

    @property
    def available(self) -> bool:
        return not self.closed

    def reset(self, version: str | None = None) -> None:
        self._version.reset(version)

    def find(
        self,
        names: Sequence[bytes],
        *,
        at_hand: int = 0,
        session: str = "",
        timeout: float | None = None,
    ) -> Found:
        """Returns how many of the first chunks a load would find. The first `at_hand` count as found; sessions protect nothing here.

        Finds no other chunk while the engine's weights have no label.
        """
        check_names(names)
        at_hand = min(max(at_hand, 0), len(names))
        if at_hand == len(names):
            return Found(at_hand, at_hand)
        if self.closed:
            return Found(at_hand, at_hand, "not_asked")
        end = None if timeout is None else time.monotonic() + timeout
        label = self._version.label
        if label is None:
            self.metrics.tokens("lookup", "requested", (len(names) - at_hand) * self.groups.first.chunk_size)
            self.metrics.trouble("lookup", "weights_unnamed")
            return Found(at_hand, at_hand, "weights_unnamed")
        keys = self.groups.keys(names[at_hand:], label)
        with self.metrics.timed("lookup"):
            statuses = self._exists(keys, timeout=None if end is None else max(0.0, end - time.monotonic()))
        return self.judge(names, at_hand, statuses, label)


class MooncakeLookupClient(LookupClient):
    """Does one `batch_is_exist` per lookup, for all chunks and all shards, in all groups of layers; and one more for what is not there, if
    `cache.tiers` has a second pool."""

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
        """Begins to connect to the master at `master_addr` (`host:port`); lookups find nothing until it answers.

        `metadata` is the engine's, or the namespace that it has told. `further` are the model's other groups of layers, if it has several.
        `history` tells evicted chunks from those that were never stored; without it, both are `missing`. `version`: that of the weights, by
        default that of the engine's files.
        """
        spaces = (one if isinstance(one, Namespace) else one.namespace(config.cache) for one in (metadata, *further))
        databases = [ChunkedTokenDatabase(space) for space in spaces]
        super().__init__(databases[0], metrics)
        self.store = MooncakeStore(config.transfer, master=master_addr, host=config.host, segment_size=0)
        second = config.second_pool
        self.second: MooncakeStore | None = None
        """The client of the second pool, if there is one."""
        if second is not None:
            self.second = MooncakeStore(second.transfer, master=second.master, host=config.host, segment_size=0)
        self.version = version or WeightsVersion()
        self._history = history
        exists = self.store.batch_exist if self.second is None else self._exist
        self._groups = LayerGroups(databases)
        self._asks = PoolLookup(self._groups, exists, self.version, self.metrics, history)
        self._timeout = self._exist_s = config.transfer.timeouts.exist_ms / 1000

    @property
    def available(self) -> bool:
        return self.store.available

    def renew(self, names: Sequence[bytes]) -> tuple[str, int] | None:
        label, step, found = self.version.label, max(1, _RENEWED // self._groups.keys_per_chunk), 0
        if label is None:
            return None
        for start in range(0, len(names), step):
            keys = self._groups.keys(names[start : start + step], label)
            statuses = self.store.batch_exist(keys, timeout=self._exist_s)
            if not {Status.OK, Status.MISSING}.intersection(statuses):
                return None
            found += statuses.count(Status.OK)
        return label, found

    def stored(self, names: Sequence[bytes]) -> None:
        if self._history is not None:
            self._history.note(names)

    def close(self) -> None:
        self.store.close()
        if self.second is not None:
            self.second.close()

    def _exist(self, keys: list[str], *, timeout: float) -> list[Status]:
        """Asks the pool, and then, in the time that is left, the second one for what the first lacks."""
        assert self.second is not None
        end = time.monotonic() + timeout
        statuses = self.store.batch_exist(keys, timeout=timeout)
        lacking = [index for index, status in enumerate(statuses) if status is not Status.OK]
        asked, seconds = [keys[index] for index in lacking], max(0.0, end - time.monotonic())
        for index, status in zip(lacking, self.second.batch_exist(asked, timeout=seconds), strict=True):
            if status is Status.OK:  # any other answer says nothing of the first pool
                statuses[index] = status
        return statuses


class BypassLookupClient(LookupClient):
    """Calls `engine.find` directly. The caller keeps ownership of the engine."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        engine: Engine,
        *,
        timeout: float | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """`timeout` (s) bounds each lookup. Raises ValueError if the namespace of `config` and `metadata` is not the engine's."""
        wanted = metadata.namespace(config.cache)
        if engine.database.namespace != wanted:
            raise ValueError(f"the engine serves {engine.database.namespace}, the client was made for {wanted}")
        super().__init__(engine.database, metrics)
        self._asks = engine
        self._timeout = timeout

    def close(self) -> None:
        self._asks = None
