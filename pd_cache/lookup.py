"""Lookups: the longest contiguous prefix of a prompt that a pool or an engine holds, and the clients that need no cache server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Tokens
from pd_cache.config import NodeSettings
from pd_cache.deadline import Deadline
from pd_cache.groups import LayerGroups
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import ChunkHistory, Found, MissReason, worst_reason
from pd_cache.versions import UNKNOWN, WeightsVersion
from transfer.errors import Status
from transfer.store import MooncakeStore


class LookupClient(ABC):
    """Finds prefixes, in tokens. Counts any error; the result is then what is already at hand."""

    def __init__(self, database: ChunkedTokenDatabase, metrics: CacheMetrics | None = None) -> None:
        """`database` names the chunks."""
        self.metrics = metrics or CacheMetrics()
        self._database = database

    @property
    @abstractmethod
    def available(self) -> bool:
        """False while the process that answers lookups is known to be unreachable: every lookup is then an immediate miss."""

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
        return self.find(names, lookup_id, at_hand=at_hand)

    def find(self, names: Sequence[bytes], lookup_id: str | None = None, *, at_hand: int = 0) -> int:
        """Does the same as `lookup` for a prompt whose chunks are already named.

        Whole chunks among the first `at_hand` tokens are not looked up, and count as found. `lookup_id` names the request in log lines. If
        a lookup protects what it found, it does so for that id, until the prefix is loaded or until `end`.
        """
        return self.survey(names, lookup_id, at_hand=at_hand).chunks * self._database.chunk_size

    def survey(self, names: Sequence[bytes], lookup_id: str | None = None, *, at_hand: int = 0) -> Found:
        """Does the same as `find`. Returns the prefix in chunks, how many chunks the layers have that need all of them, and why the prefix
        is not longer."""
        chunks = min(max(at_hand, 0) // self._database.chunk_size, len(names))
        if chunks < len(names):
            try:
                return self._find(names, chunks, lookup_id or "")
            except Exception as error:  # noqa: BLE001 - a lookup never fails its request
                self._count(error, lookup_id)
                return Found(chunks, chunks, "error")
        return Found(chunks, chunks)

    @abstractmethod
    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Found:
        """Returns the end of the prefix. All numbers are in chunks. May raise any exception."""

    @abstractmethod
    def reset(self, version: str | None = None) -> str | None:
        """Says that the engine has other weights now: nothing that was stored before is found or loaded by it again.

        Call it once for each change on each engine, or give the `version` of the weights: 1 to 64 letters, digits, dots, dashes and
        underscores. Returns the version's label when no node can load what was stored before. None if that was refused or not answered; then
        this engine finds nothing until a later call succeeds. Waits up to 8 s. Raises ValueError for a label that cannot be one.
        """

    def stored(self, names: Sequence[bytes]) -> None:  # noqa: B027 - only some clients keep a history
        """Notes that the engine has stored these chunks, so that they count as evicted if a later lookup does not find them."""

    def end(self, lookup_id: str) -> None:  # noqa: B027 - only some clients protect anything
        """Releases what the lookups of this id protect. Call it when the request is over."""

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
    """Asks once for all chunks of a prompt, in all groups of layers, and counts requested and found tokens."""

    def __init__(self, groups: LayerGroups, metrics: CacheMetrics, history: ChunkHistory | None = None) -> None:
        """`history` learns what is found, and says of what is missing whether it was there before. Without it, no lookup knows."""
        self.groups = groups
        self.metrics = metrics
        self._history = history

    def find(
        self,
        names: Sequence[bytes],
        at_hand: int,
        exists: Callable[..., list[Status]],
        epoch: str | None,
        timeout: float | Deadline | None = None,
    ) -> Found:
        """Returns how many of the first chunks a load could restore. The first `at_hand` count as found.

        `exists(keys, timeout=…)` looks up a list of keys with one request, within the seconds that are left of `timeout`. `epoch` is the weights version to
        look in; if it is unknown, no chunk is found.
        """
        if at_hand == len(names):
            return Found(len(names), len(names))
        if epoch is None:
            return self._unknown(names, at_hand, exists, timeout)
        keys = self.groups.keys(names[at_hand:], epoch)
        with self.metrics.timed("lookup"):
            statuses = exists(keys, timeout=Deadline.of(timeout).left())
        return self.judge(names, at_hand, statuses, epoch)

    def _unknown(
        self,
        names: Sequence[bytes],
        at_hand: int,
        exists: Callable[..., list[Status]],
        timeout: float | Deadline | None,
    ) -> Found:
        """Returns the answer to a lookup while the weights version is unknown: nothing but what is at hand. Counts it.

        Asks for one key that no chunk has: a pool that is down, often with the authority of versions, is noticed all the same.
        """
        self.metrics.tokens("lookup", "requested", (len(names) - at_hand) * self.groups.first.chunk_size)
        keys = self.groups.keys(names[at_hand : at_hand + 1], UNKNOWN)[:1]
        statuses = exists(keys, timeout=Deadline.of(timeout).left())
        reason = worst_reason(statuses)
        if reason in ("none", "missing"):
            reason = "epoch_unknown"
            self.metrics.trouble("lookup", reason)
        self.metrics.outages("lookup", statuses)
        return Found(at_hand, at_hand, reason)

    def judge(self, names: Sequence[bytes], at_hand: int, statuses: Sequence[Status], epoch: str) -> Found:
        """Returns how many of the first chunks were found, and why not more. Counts their tokens.

        `statuses` are those of the chunks after the first `at_hand`, in the order of `LayerGroups.keys`, in the weights version `epoch`.
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
            self._history.follow(epoch)
        reason = self._reason(names[at_hand:], found, statuses)
        if self._history is not None:
            # of groups that all have a tail, only the end of a prefix is known to be there
            first = 0 if self.groups.need_all else max(0, found.leading - 1)
            self._history.note(names[at_hand + first : at_hand + found.leading])
        return Found(at_hand + found.chunks, at_hand + found.leading, reason, epoch)

    def _reason(self, names: Sequence[bytes], found: Found, statuses: Sequence[Status]) -> MissReason:
        """Returns why the first chunk that was not found was not there."""
        if found.leading > found.chunks:
            worst = worst_reason(statuses)
            return "no_tail" if worst == "missing" else worst
        if found.chunks == len(names):
            return "none"
        reason = worst_reason(self.groups.of_chunk(statuses, found.chunks))
        return reason if self._history is None else self._history.explain(reason, names[found.chunks])


class MooncakeLookupClient(LookupClient):
    """Does one `batch_is_exist` per lookup, for all chunks and all shards, in all groups of layers."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        master_addr: str,
        *,
        further: Sequence[CacheMetadata] = (),
        metrics: CacheMetrics | None = None,
        history: ChunkHistory | None = None,
        watches: bool = False,
    ) -> None:
        """Begins to connect to the master at `master_addr` (`host:port`); lookups find nothing until it answers.

        `further` are the model's other groups of layers, if it has several. `history` tells evicted chunks from those that were never
        stored; without it, both are `missing`. `watches`: look in the current version of the weights, because this process has none itself.
        """
        databases = [ChunkedTokenDatabase(one.namespace(config.cache)) for one in (metadata, *further)]
        super().__init__(databases[0], metrics)
        self.store = MooncakeStore(config.transfer, master=master_addr, host=config.host, segment_size=0)
        self._timeout = config.transfer.timeouts.exist_ms / 1000
        self._history = history
        self._prefix = PrefixLookup(LayerGroups(databases), self.metrics, self._history)
        self.version = WeightsVersion.of(config, metadata.model, watches=watches)

    @property
    def available(self) -> bool:
        return self.store.available

    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Found:
        deadline = Deadline(self._timeout)
        return self._prefix.find(names, at_hand, self.store.batch_exist, self.version.current(deadline), deadline)

    def reset(self, version: str | None = None) -> str | None:
        return self.version.reset(version)

    def stored(self, names: Sequence[bytes]) -> None:
        if self._history is not None:
            self._history.note(names)

    def close(self) -> None:
        self.version.close()
        self.store.close()


class LooksUp(Protocol):
    """The part of a `CacheEngine`, or of an `EngineGroups`, that is needed here. This layer does not import either."""

    @property
    def database(self) -> ChunkedTokenDatabase: ...

    @property
    def available(self) -> bool: ...

    def survey(
        self, names: Sequence[bytes], *, at_hand: int = 0, epoch: str | None = None, timeout: float | None = None
    ) -> Found: ...

    def reset(self, version: str | None = None) -> str | None: ...


class BypassLookupClient(LookupClient):
    """Calls `engine.survey` directly. The caller keeps ownership of the engine."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        engine: LooksUp,
        *,
        timeout: float | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """`timeout` (s) bounds each lookup. Raises ValueError if the namespace of `config` and `metadata` is not the engine's."""
        wanted = metadata.namespace(config.cache)
        if engine.database.namespace != wanted:
            raise ValueError(f"the engine serves {engine.database.namespace}, the client was made for {wanted}")
        super().__init__(engine.database, metrics)
        self._engine: LooksUp | None = engine
        self._timeout = timeout

    @property
    def available(self) -> bool:
        return self._engine is not None and self._engine.available

    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Found:
        if self._engine is None:
            return Found(at_hand, at_hand, "not_asked")
        return self._engine.survey(names, at_hand=at_hand, timeout=self._timeout)

    def reset(self, version: str | None = None) -> str | None:
        return None if self._engine is None else self._engine.reset(version)

    def close(self) -> None:
        self._engine = None
