"""MooncakeLookupClient: asks the pool's master itself, with a store client that has no segment and no staging memory."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cache.config import NodeSettings
from pd_cache.epochs import EpochBook
from pd_cache.groups import LayerGroups, Surveyed
from pd_cache.lookup.base import LookupClient
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.misses import ChunkHistory
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase
from transfer.errors import Status
from transfer.store import MooncakeStore


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
    ) -> None:
        """Begins to connect to the master at `master_addr` (`host:port`); lookups find nothing until it answers.

        `further` are the model's other groups of layers, if it has several. `history` tells evicted chunks from those that were never
        stored; without it, both are `missing`.
        """
        databases = [ChunkedTokenDatabase(one.namespace(config.cache)) for one in (metadata, *further)]
        super().__init__(databases[0], metrics)
        self.store = MooncakeStore(config.transfer, master=master_addr, host=config.host, segment_size=0)
        self._timeout = config.transfer.timeouts.exist_ms / 1000
        self._history = history
        self._prefix = PrefixLookup(LayerGroups(databases), self.metrics, self._history)
        self._epochs = EpochBook(self.store, timeout_s=self._timeout).of(metadata.model)

    @property
    def available(self) -> bool:
        return self.store.available

    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Surveyed:
        return self._prefix.find(names, at_hand, self._exist, self._epochs, self._timeout)

    def reset(self) -> str | None:
        return self._epochs.begin()

    def stored(self, names: Sequence[bytes]) -> None:
        if self._history is not None:
            self._history.note(names)

    def _exist(self, keys: list[str], left: float | None) -> list[Status]:
        return self.store.batch_exist(keys, timeout=self._timeout if left is None else left)

    def close(self) -> None:
        self.store.close()
