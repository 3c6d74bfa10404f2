"""Keeps blocks out of vLLM's own prefix cache until it is known that what they hold is right.

vLLM puts the blocks of a request into its prefix cache when it schedules the step that fills them. If a load within that step fails, vLLM
recomputes the request, but it leaves the blocks in the cache: a request that begins in between takes them for good, and so does any later
one if the first is aborted or preempted before it has computed them again. (vLLM 0.32, `Scheduler._handle_invalid_blocks`; with
`recompute` it evicts nothing.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from pd_cache.vllm.layers import KeptLayers


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
