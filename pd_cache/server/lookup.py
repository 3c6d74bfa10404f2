"""ServerLookupClient: asks the cache server of this host, which keeps what it found for the request that asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_cache.config import NodeSettings
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.server.channel import Context
from pd_cache.server.client import CacheClient, failure_of
from pd_cache.server.messages import Found
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Tokens


class ServerLookupClient(LookupClient):
    """Lookups for the scheduler of an engine whose workers have lent the server their KV tensors."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        url: str,
        timeout_s: float,
        *,
        context: Context[Any] | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Begin to connect; lookups are 0 while there is no server. ValueError for a bad address.

        The answer to a lookup is waited for `timeout_s` at most.
        """
        super().__init__(metrics)
        self._database = ChunkedTokenDatabase(metadata.namespace(config.cache))
        self._timeout_s = timeout_s
        self._client = CacheClient.of(url, context, "scheduler", metadata, config.cache)

    @property
    def available(self) -> bool:
        """Whether the server is there."""
        return self._client.ready

    def _lookup(
        self,
        token_ids: Tokens | None,
        block_hashes: Sequence[bytes] | None,
        held: int,
        extra_keys: Sequence[ExtraKey],
        lookup_id: str | None,
    ) -> int:
        size = self._database.chunk_size
        names = self._database.name_chunks(token_ids, block_hashes, extra_keys)
        skip = min(max(held, 0) // size, len(names))
        if skip == len(names):
            return skip * size
        with self.metrics.timed("lookup"):
            future = self._client.lookup(lookup_id or "", names, held=skip, timeout=self._timeout_s)
            reason = failure_of(future)  # waits
        answer = None if reason else future.result()
        if not isinstance(answer, Found):
            self.metrics.trouble("lookup", reason or "nonsense")
            return 0
        self.metrics.tokens("lookup", "requested", (len(names) - skip) * size)
        self.metrics.tokens("lookup", "hit", (answer.chunks - skip) * size)
        return answer.chunks * size

    def end(self, lookup_id: str) -> None:
        self._client.end_session(lookup_id)

    def close(self) -> None:
        self._client.close()
