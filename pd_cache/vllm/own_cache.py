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
        """From now on, keeps blocks of outdated requests out of vLLM's own cache.

        vLLM puts a block into its cache when it plans the step that fills the block, and when a load ends.
        With asynchronous scheduling (and since 0.33 with drafts), it also does so when it takes in a step's
        tokens. The next planned request can find the block at once, so removing it afterwards would be too
        late. vLLM has no call to prevent this. It puts every block there by the coordinator's `cache_blocks`,
        so this class replaces that method.
        """
        self.weights = weights
        """The last known state of the engine's weights."""
        self._ids: set[str] = set()
        self._pool = manager.block_pool
        coordinator: Any = manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_unless_outdated(request: Any, *args: Any, **kwargs: Any) -> None:
            if request.request_id not in self._ids:
                cache_blocks(request, *args, **kwargs)

        coordinator.cache_blocks = cache_unless_outdated

    def begin(self, weights: Weights, requests: Iterable[TrackedRequest]) -> None:
        """Notes a new state of the weights, and empties vLLM's own cache. Those of `requests` that have KV
        are outdated from now on."""
        self.weights = weights
        self._ids.update(
            tracked.id for tracked in requests if tracked.at_hand or tracked.request.num_computed_tokens
        )
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def forget(self, request_id: str) -> None:
        """Notes that the request has ended, or has no KV except from vLLM's own cache."""
        self._ids.discard(request_id)
