"""What may get into vLLM's own prefix cache: nothing of outdated requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pd_cache.versions import Weights

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from pd_cache.vllm.tracked import TrackedRequest


class OutdatedRequests:
    """One per engine. Nothing of an outdated request may be stored, nor get into vLLM's own cache."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        """The state of the engine's weights, as last known."""
        self._ids: set[str] = set()
        self._pool: BlockPool

    def bind(self, manager: KVCacheManager) -> None:
        """Keeps what outdated requests compute out of vLLM's own cache from now on.

        vLLM puts a block there when it plans the step that fills the block, or when it takes notice of a load's end or of a step's tokens
        (with asynchronous scheduling; from 0.33 on with drafts, too), and a request that it plans for next can find it at once: to take the
        block out again afterwards would be too late. vLLM has no call for this, so its coordinator's `cache_blocks`, through which every
        block gets there, is replaced.
        """
        self._pool = manager.block_pool
        coordinator: Any = manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_unless_outdated(request: Any, *args: Any, **kwargs: Any) -> None:
            if request.request_id not in self._ids:
                cache_blocks(request, *args, **kwargs)

        coordinator.cache_blocks = cache_unless_outdated

    def begin(self, weights: Weights, requests: Iterable[TrackedRequest]) -> None:
        """Notes another state. What `requests` have computed so far belongs to an earlier one, and so does what vLLM's own cache holds."""
        self.weights = weights
        self._ids.update(one.id for one in requests if one.at_hand or one.request.num_computed_tokens)
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def forget(self, request_id: str) -> None:
        """Notes that the request has ended, or begins or begins anew, without any KV but what it may have found in vLLM's own cache."""
        self._ids.discard(request_id)
