"""What may get into vLLM's own prefix cache: nothing of outdated requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pd_cache.versions import WeightsVersion

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from pd_cache.vllm.tracked import TrackedRequest


class OutdatedRequests:
    """One per engine. Nothing of an outdated request may be stored, nor get into vLLM's own cache."""

    def __init__(self, version: WeightsVersion, manager: KVCacheManager) -> None:
        """Keeps what outdated requests compute out of vLLM's own cache from now on.

        vLLM puts a block there when it plans the step that fills the block, or when it takes notice of a load's end or of a step's tokens
        (with asynchronous scheduling; from 0.33 on with drafts, too), and a request that it plans for next can find it at once: to take the
        block out again afterwards would be too late. vLLM has no call for this, so its coordinator's `cache_blocks`, through which every
        block gets there, is replaced.
        """
        self._version = version
        self.weights = version.state
        """The state of the engine's weights, as last known."""
        self._ids: set[str] = set()
        self._pool = manager.block_pool
        coordinator: Any = manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_unless_outdated(request: Any, *args: Any, **kwargs: Any) -> None:
            if request.request_id not in self._ids:
                cache_blocks(request, *args, **kwargs)

        coordinator.cache_blocks = cache_unless_outdated

    def follow(self, requests: Iterable[TrackedRequest]) -> bool:
        """Returns whether the weights are in another state than before. If so, what `requests` have computed is outdated, and so is what vLLM's
        own cache holds."""
        if self._version.state is self.weights:
            return False
        self.weights = self._version.state
        self._ids.update(tracked.id for tracked in requests if tracked.at_hand or tracked.request.num_computed_tokens)
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def forget(self, request_id: str) -> None:
        """Notes that the request has ended, or begins or begins anew, without any KV but what it may have found in vLLM's own cache."""
        self._ids.discard(request_id)
