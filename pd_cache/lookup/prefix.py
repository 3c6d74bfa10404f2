"""PrefixLookup: finds the longest contiguous prefix in a backend or a pool. Used by the engine, the cache server and lookup clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ChunkedTokenDatabase, leading_chunks
from transfer.errors import Status


class PrefixLookup:
    """Asks once for all chunks of a prompt, and counts requested and found tokens."""

    def __init__(self, database: ChunkedTokenDatabase, metrics: CacheMetrics) -> None:
        self._database = database
        self.metrics = metrics

    def find(self, names: Sequence[bytes], at_hand: int, exists: Callable[[list[str]], list[Status]]) -> int:
        """Returns how many of the first chunks exist with every shard. The first `at_hand` count as found.

        `exists` looks up a list of keys with one request.
        """
        keys = self._database.all_shard_keys(names[at_hand:])
        if not keys:
            return len(names)
        with self.metrics.timed("lookup"):
            statuses = exists(keys)
        return self.judge(len(names), at_hand, statuses)

    def judge(self, chunks: int, at_hand: int, statuses: Sequence[Status]) -> int:
        """Returns how many of the first `chunks` were found, and counts their tokens.

        `statuses` are those of all shards of the chunks after the first `at_hand`.
        """
        size, metrics = self._database.chunk_size, self.metrics
        metrics.tokens("lookup", "requested", (chunks - at_hand) * size)
        if statuses.count(Status.OK) == len(statuses):
            found = chunks - at_hand
        else:
            found = leading_chunks((status is Status.OK for status in statuses), self._database.namespace.shards)
            metrics.outages("lookup", statuses)
        metrics.tokens("lookup", "hit", found * size)
        return at_hand + found
