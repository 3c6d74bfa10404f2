"""PrefixLookup: the one way to find the longest contiguous prefix, for every client and for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ChunkedTokenDatabase, ExtraKey, Tokens, leading_chunks
from transfer.errors import Status


class PrefixLookup:
    """Names the chunks of a prompt, asks once for all of them, and counts."""

    def __init__(
        self, database: ChunkedTokenDatabase, exists: Callable[[list[str]], list[Status]], metrics: CacheMetrics
    ) -> None:
        """`exists` answers a list of keys with one request."""
        self._database = database
        self._exists = exists
        self._metrics = metrics

    def find(
        self, tokens: Tokens | None, hashes: Sequence[bytes] | None, held: int, extra_keys: Iterable[ExtraKey]
    ) -> int:
        """End of the longest contiguous prefix whose every shard exists, in tokens; see `LookupClient.lookup`."""
        return self.find_named(self._database.name_chunks(tokens, hashes, extra_keys), held)

    def find_named(self, names: Sequence[bytes], held: int = 0) -> int:
        """The same for a prompt whose chunks are named already."""
        keys = self.wanted(names, held)
        if not keys:
            return len(names) * self._database.chunk_size
        with self._metrics.timed("lookup"):
            statuses = self._exists(keys)
        return self.judge(names, held, statuses)

    def wanted(self, names: Sequence[bytes], held: int) -> list[str]:
        """The keys to ask for, of all shards; none if all that there is to find is held."""
        return self._database.all_shard_keys(names[self._skip(names, held) :])

    def judge(self, names: Sequence[bytes], held: int, statuses: Sequence[Status]) -> int:
        """What the statuses of the `wanted` keys say: end of the prefix, in tokens. Counts."""
        database, metrics = self._database, self._metrics
        size, skip = database.chunk_size, self._skip(names, held)
        metrics.tokens("lookup", "requested", (len(names) - skip) * size)
        if statuses.count(Status.OK) == len(statuses):
            found = len(names) - skip
        else:
            found = leading_chunks((status is Status.OK for status in statuses), database.namespace.shards)
        metrics.outages("lookup", statuses)
        metrics.tokens("lookup", "hit", found * size)
        return (skip + found) * size

    def _skip(self, names: Sequence[bytes], held: int) -> int:
        return min(max(held, 0) // self._database.chunk_size, len(names))
