"""BypassLookupClient: the engine lives in this process; ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cache.config import NodeSettings
from pd_cache.lookup.base import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import CacheMetadata, ExtraKey, Namespace, Tokens


class LooksUp(Protocol):
    """What is needed of a `CacheEngine`, which this layer does not import."""

    @property
    def namespace(self) -> Namespace: ...

    def lookup(
        self,
        tokens: Tokens | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        held: int = 0,
        extra_keys: Sequence[ExtraKey] = (),
    ) -> int: ...


class BypassLookupClient(LookupClient):
    """Calls `engine.lookup` directly; the engine stays its owner's."""

    def __init__(
        self, config: NodeSettings, metadata: CacheMetadata, engine: LooksUp, *, metrics: CacheMetrics | None = None
    ) -> None:
        """ValueError if `config` and `metadata` name another namespace than the engine's."""
        super().__init__(metrics)
        if engine.namespace != metadata.namespace(config.cache):
            raise ValueError(
                f"the engine serves {engine.namespace}, the client was made for {metadata.namespace(config.cache)}"
            )
        self._engine: LooksUp | None = engine

    def _lookup(
        self,
        token_ids: Tokens | None,
        block_hashes: Sequence[bytes] | None,
        held: int,
        extra_keys: Sequence[ExtraKey],
        lookup_id: str | None,
    ) -> int:
        if self._engine is None:
            return 0
        return self._engine.lookup(token_ids, hashes=block_hashes, held=held, extra_keys=extra_keys)

    def close(self) -> None:
        self._engine = None
