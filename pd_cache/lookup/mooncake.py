"""MooncakeLookupClient: asks the pool's master itself, with a store client that has no segment and no staging memory."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cache.config import NodeSettings
from pd_cache.lookup.base import LookupClient
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Tokens
from transfer.store import MooncakeStore


class MooncakeLookupClient(LookupClient):
    """One `batch_is_exist` a lookup, for all chunks and all shards."""

    def __init__(
        self, config: NodeSettings, metadata: CacheMetadata, master_addr: str, *, metrics: CacheMetrics | None = None
    ) -> None:
        """Begin to connect to the master at `master_addr` (`host:port`); lookups are 0 until it answers."""
        super().__init__(metrics)
        self.store = MooncakeStore(config.transfer, master=master_addr, host=config.host, segment_size=0)
        timeout = config.transfer.timeouts.exist_ms / 1000
        self._prefix = PrefixLookup(
            ChunkedTokenDatabase(metadata.namespace(config.cache)),
            lambda keys: self.store.batch_exist(keys, timeout=timeout),
            self.metrics,
        )

    def _lookup(
        self,
        token_ids: Tokens | None,
        block_hashes: Sequence[bytes] | None,
        held: int,
        extra_keys: Sequence[ExtraKey],
        lookup_id: str | None,
    ) -> int:
        return self._prefix.find(token_ids, block_hashes, held, extra_keys)

    def close(self) -> None:
        self.store.close()
