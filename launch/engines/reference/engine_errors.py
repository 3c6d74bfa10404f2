"""What the reference engine raises to the caller that started it or sent it a request."""

from __future__ import annotations

from typing import Literal

from pd_cache.errors import PdCacheError


class QueueFullError(PdCacheError):
    """The queue is full; try again later."""


class EngineClosedError(PdCacheError):
    """The engine is closing or closed and accepts no more requests."""


class GenerationError(PdCacheError):
    """A request that ended without all of its tokens."""

    def __init__(self, kind: Literal["timeout", "aborted", "closed", "failed"], message: str) -> None:
        super().__init__(message)
        self.kind = kind
