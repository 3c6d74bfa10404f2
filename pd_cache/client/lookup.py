"""Lookup clients that ask another process: a cache server, or the worker of an engine in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pd_cache.client.identity import EngineIdentity
from pd_cache.client.server_cache import ServerCache
from pd_cache.config import NodeSettings
from pd_cache.groups import Surveyed
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase
from pd_cache.wire.channel import Context


class ServerLookupClient(LookupClient):
    """Asks the cache server of this host, which protects what it found for the request that asked."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        url: str,
        timeout_s: float,
        *,
        further: Sequence[CacheMetadata] = (),
        context: Context[Any] | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Begins to connect; lookups find nothing while there is no server. Raises ValueError for a bad address.

        A lookup waits at most `timeout_s` for its answer. `further` are the model's other groups of layers, if it has several.
        """
        super().__init__(ChunkedTokenDatabase(metadata.namespace(config.cache)), metrics)
        self._cache = ServerCache(
            url,
            self._identity(config, metadata, further),
            kind="scheduler",
            context=context,
            lookup_timeout_s=timeout_s,
            metrics=self.metrics,
        )

    def _identity(
        self, config: NodeSettings, metadata: CacheMetadata, further: Sequence[CacheMetadata]
    ) -> EngineIdentity:
        return EngineIdentity.of(metadata, config.cache, further)

    @property
    def available(self) -> bool:
        return self._cache.available

    def wait_connected(self, timeout: float) -> None:
        """Waits for the server. Raises NoAnswerError after `timeout` seconds, RefusedError if it does not take this engine."""
        self._cache.connection.wait_ready(timeout)

    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Surveyed:
        return self._cache.begin_lookup(names, at_hand=at_hand, session=lookup_id).survey()

    def reset(self) -> str | None:
        return self._cache.reset()

    def end(self, lookup_id: str) -> None:
        self._cache.end(lookup_id)

    def close(self) -> None:
        self._cache.close()


class RpcLookupClient(ServerLookupClient):
    """Asks an `RpcLookupServer`, which knows one engine. Waits twice as long for an answer as the engine may wait for its pool."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        url: str,
        *,
        context: Context[Any] | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Begins to connect; lookups find nothing until the server answers. Raises ValueError for a bad address."""
        seconds = 2 * config.transfer.timeouts.exist_ms / 1000
        super().__init__(config, metadata, url, seconds, context=context, metrics=metrics)

    def _identity(
        self, config: NodeSettings, metadata: CacheMetadata, further: Sequence[CacheMetadata]
    ) -> EngineIdentity:
        fingerprint = metadata.namespace(config.cache).fingerprint()
        return msgspec.structs.replace(EngineIdentity.of(metadata, config.cache), namespace=fingerprint)

    @property
    def available(self) -> bool:
        return True  # the worker lives as long as its scheduler, and knows the pool's state itself

    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Surveyed:
        return self._cache.begin_lookup(names, at_hand=at_hand).survey()
