"""Keeps KV of earlier weights out of vLLM's own prefix cache, and out of the pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pd_cache.versions import Weights

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from pd_cache.vllm.tracked import TrackedRequest


class OutdatedRequests:
    """The requests that began with earlier weights. There is an instance for each engine."""

    def __init__(self, weights: Weights, manager: KVCacheManager) -> None:
        """From now on, blocks of outdated requests do not get into vLLM's own cache.

        vLLM puts a block there when it plans the step that fills the block, when a load ends, or (with
        asynchronous scheduling; from 0.33 on with drafts, too) when it takes in a step's tokens. The request
        that it plans next can find the block at once, so it would be too late to take the block out
        afterwards. vLLM has no call for this. Every block gets there through the coordinator's
        `cache_blocks`, so this replaces it.
        """
        self.weights = weights
        """The state of the engine's weights, as last known."""
        self._ids: set[str] = set()
        self._pool = manager.block_pool
        coordinator: Any = manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_unless_outdated(request: Any, *args: Any, **kwargs: Any) -> None:
            if request.request_id not in self._ids:
                cache_blocks(request, *args, **kwargs)

        coordinator.cache_blocks = cache_unless_outdated

    def begin(self, weights: Weights, requests: Iterable[TrackedRequest]) -> None:
        """Notes another state of the weights: `requests` that have KV are outdated, and vLLM's own cache is
        emptied."""
        self.weights = weights
        self._ids.update(
            tracked.id for tracked in requests if tracked.at_hand or tracked.request.num_computed_tokens
        )
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def forget(self, request_id: str) -> None:
        """Notes that the request has ended, or that it has no KV, except from vLLM's own cache."""
        self._ids.discard(request_id)
