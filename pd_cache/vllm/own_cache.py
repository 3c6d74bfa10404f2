"""What may get into vLLM's own prefix cache: nothing of outdated requests, and no block whose load is not known to have succeeded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pd_cache.versions import FIRST

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from pd_cache.vllm.layers import KeptLayers
    from pd_cache.vllm.requests import TrackedRequest


class OutdatedRequests:
    """One per engine. Nothing of an outdated request may be stored, nor get into vLLM's own cache."""

    def __init__(self) -> None:
        self.epoch = FIRST
        """The weights version that the engine computes in, as last known."""
        self._ids: set[str] = set()
        self._pool: BlockPool

    def bind(self, manager: KVCacheManager) -> None:
        """Keeps what outdated requests compute out of vLLM's own cache from now on.

        vLLM puts a block there when it plans the step that fills the block, or when it takes notice of a load's end, and a request that it
        plans for next can find it at once: to take the block out again afterwards would be too late. vLLM has no call for this, so its
        coordinator's `cache_blocks`, through which every block gets there, is replaced.
        """
        self._pool = manager.block_pool
        coordinator: Any = manager.coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_unless_outdated(request: Any, *args: Any, **kwargs: Any) -> None:
            if request.request_id not in self._ids:
                cache_blocks(request, *args, **kwargs)

        coordinator.cache_blocks = cache_unless_outdated

    def begin_epoch(self, epoch: str, requests: Iterable[TrackedRequest]) -> None:
        """Notes a new version. What `requests` have computed so far belongs to an earlier one, and so does what vLLM's own cache holds."""
        self.epoch = epoch
        self._ids.update(one.id for one in requests if one.at_hand or one.request.num_computed_tokens)
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def forget(self, request_id: str) -> None:
        """Notes that the request has ended, or begins or begins anew, without any KV but what it may have found in vLLM's own cache."""
        self._ids.discard(request_id)


class HiddenBlocks:
    """The blocks of one request that are not in vLLM's own prefix cache yet, although vLLM takes them for cached."""

    def __init__(self, manager: KVCacheManager, request: Request, layers: KeptLayers, first_token: int) -> None:
        """Takes the request's blocks, from that of `first_token` on, out of the cache."""
        self._manager = manager
        self._request = request
        self._layers = layers
        self._next = first_token // layers.block_size
        """The first block that is hidden."""
        blocks = manager.get_blocks(request.request_id).blocks[layers.number][self._next :]
        self._blocks = [block.block_id for block in blocks if block.block_hash is not None]
        manager.block_pool.evict_blocks(set(self._blocks))

    def show(self, good_tokens: int) -> bool:
        """Puts the blocks of the first `good_tokens` tokens into the cache. Returns whether any are still hidden."""
        size, number = self._layers.block_size, self._layers.number
        end = max(self._next, min(self._next + len(self._blocks), good_tokens // size))
        blocks = self._manager.get_blocks(self._request.request_id).blocks[number]
        ids = [block.block_id for block in blocks[self._next : end]]
        if ids != self._blocks[: end - self._next] or any(block.block_hash for block in blocks[self._next : end]):
            return False  # the request was preempted meanwhile, and these are other blocks
        if end > self._next:
            self._manager.block_pool.cache_full_blocks(
                request=self._request,
                blocks=list(blocks),
                num_cached_blocks=self._next,
                num_full_blocks=end,
                block_size=size,
                kv_cache_group_id=number,
            )
            self._blocks = self._blocks[end - self._next :]
            self._next = end
        return bool(self._blocks)
