"""BypassLookupClient: asks the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cache.config import NodeSettings
from pd_cache.groups import Surveyed
from pd_cache.lookup.base import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase


class LooksUp(Protocol):
    """The part of a `CacheEngine`, or of an `EngineGroups`, that is needed here. This layer does not import either."""

    @property
    def database(self) -> ChunkedTokenDatabase: ...

    @property
    def available(self) -> bool: ...

    def survey(self, names: Sequence[bytes], *, at_hand: int = 0, timeout: float | None = None) -> Surveyed: ...

    def reset(self) -> str | None: ...


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

    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Surveyed:
        if self._engine is None:
            return Surveyed(at_hand, at_hand, "not_asked")
        return self._engine.survey(names, at_hand=at_hand, timeout=self._timeout)

    def reset(self) -> str | None:
        return None if self._engine is None else self._engine.reset()

    def close(self) -> None:
        self._engine = None
