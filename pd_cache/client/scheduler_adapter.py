"""SchedulerAdapter: what a serving engine's scheduler asks a cache server. Only the constructor waits.

The API is that of `LMCacheMPSchedulerAdapter` in vLLM. A scheduler may call it thousands of times a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pd_cache.client.identity import EngineIdentity
from pd_cache.client.server_cache import PendingLookup, ServerCache
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ExtraKey
from pd_cache.wire.channel import Context


class SchedulerAdapter:
    """Lookups for one engine. Any failure is a miss, with a counter for each reason."""

    def __init__(
        self,
        server_url: str,
        context: Context[Any] | None,
        identity: EngineIdentity,
        *,
        connect_timeout_s: float = 10.0,
        lookup_timeout_s: float = 1.0,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Arguments and errors are those of `ServerCache`. A lookup without an answer after `lookup_timeout_s` is a miss."""
        self._cache = ServerCache(
            server_url,
            identity,
            kind="scheduler",
            context=context,
            connect_timeout_s=connect_timeout_s,
            lookup_timeout_s=lookup_timeout_s,
            metrics=metrics,
        )
        self.metrics = self._cache.metrics
        self.chunk_size = self._cache.chunk_size
        self._lookups: dict[str, PendingLookup] = {}
        """By request."""

    @property
    def available(self) -> bool:
        """Whether the server is there."""
        return self._cache.available

    @property
    def epoch(self) -> str | None:
        """The epoch of the model's weights, as the last answer told it; for `LoadStoreOp.epoch`. None before the first answer."""
        return self._cache.epoch

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: list[bytes] | None = None,
        token_ids: list[int] | None = None,
        *,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> None:
        """Begins a lookup for a request, unless one has already begun.

        Needs exactly one of `block_hashes` (one per block; hash mode) and `token_ids` (token mode); raises ValueError otherwise. What is
        found is protected from eviction until it is retrieved, until `end_session`, or until the session's deadline at the server.
        `extra_keys` is the request's isolation (cache salt, LoRA name, ...), in token mode.
        """
        if request_id not in self._lookups:
            names = self._cache.name_chunks(token_ids, block_hashes, extra_keys)
            self._lookups[request_id] = self._cache.begin_lookup(names, session=request_id)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Returns how many tokens of the request's prefix the cache holds; None while the lookup is under way.

        Raises ValueError for a request without a submitted lookup.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            raise ValueError(f"no lookup was submitted for request {request_id!r}")
        found = lookup.query()
        return None if found is None else found * self.chunk_size

    def num_blocks_per_chunk(self) -> int:
        """Returns the number of the engine's blocks in a chunk."""
        return self._cache.blocks_per_chunk

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forgets a request's lookup. Does nothing if there is none. A later lookup with that id is a new one."""
        self._lookups.pop(request_id, None)

    def end_session(self, request_id: str) -> None:
        """Informs the server that a request has ended, so that it need no longer protect what its lookup found."""
        self._cache.end(request_id)

    def shutdown(self) -> None:
        """Disconnects. Idempotent."""
        self._cache.close()
