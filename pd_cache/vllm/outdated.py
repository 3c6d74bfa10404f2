"""OutdatedRequests: which requests have KV of an earlier epoch of the weights."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from pd_cache.epochs import FIRST
from pd_cache.vllm.requests import TrackedRequest

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.core.kv_cache_manager import KVCacheManager

_CACHED_LATE = 3
"""In how many of a request's own steps, at most, vLLM may put a block into its own cache, from the one that fills the block."""


class OutdatedRequests:
    """One per engine. Nothing of an outdated request may be stored, nor kept in vLLM's own cache."""

    def __init__(self) -> None:
        self.epoch = FIRST
        """The epoch that the engine computes in, as last known."""
        self._leftovers: dict[str, _Leftover] = {}
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Takes the manager that knows each request's blocks."""
        self._manager = manager

    def begin_epoch(self, epoch: str, requests: Iterable[TrackedRequest]) -> None:
        """Notes a new epoch. What `requests` have computed so far belongs to an earlier one, and so does what vLLM's own cache holds."""
        self.epoch = epoch
        for tracked in requests:
            if tracked.at_hand or tracked.request.num_computed_tokens:
                self._leftovers.setdefault(tracked.id, _Leftover())
        if self._manager is not None:
            pool = self._manager.block_pool
            pool.evict_blocks(set(range(pool.num_gpu_blocks)))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leftovers

    def begin_request(self, tracked: TrackedRequest) -> None:
        """Notes whether a request that begins, or begins again, may have KV of an earlier epoch at hand: while there are outdated requests,
        what vLLM's own cache has for it may come from them."""
        if tracked.at_hand and self._leftovers:
            self._leftovers.setdefault(tracked.id, _Leftover()).begin_request()
        else:
            self.end_request(tracked.id)

    def end_request(self, request_id: str) -> None:
        """Takes out of vLLM's own cache what an outdated request has put there, and forgets the request."""
        if request_id in self._leftovers:
            self._evict([request_id])
            del self._leftovers[request_id]

    def begin_step(self, computing: Container[str]) -> None:
        """Takes out of vLLM's own cache what outdated requests have put there since the last step. `computing`: the requests of this one."""
        self._evict(list(self._leftovers), computing)

    def _evict(self, request_ids: Sequence[str], computing: Container[str] = ()) -> None:
        if not request_ids or self._manager is None:
            return
        found: set[int] = set()
        for request_id in request_ids:
            leftover = self._leftovers[request_id]
            by_group = self._manager.get_blocks(request_id).blocks
            if not any(by_group):  # preempted: those that it had may still be in the cache
                found |= leftover.blocks
                continue
            new = leftover.begin_step([len(blocks) for blocks in by_group], computes=request_id in computing)
            leftover.blocks = {
                block.block_id for blocks, start in zip(by_group, new, strict=True) for block in blocks[start:]
            }
            found |= leftover.blocks
        self._manager.block_pool.evict_blocks(found)


class _Leftover:
    """Which blocks of an outdated request vLLM may have put into its own cache since they were last taken out."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        """Those that were taken out with the last step."""
        self._lengths: list[list[int]] = []
        """How many blocks the request had in each of the last steps that computed for it, by vLLM's groups."""

    def begin_request(self) -> None:
        """Notes that the request has no blocks, and is about to get some."""
        self._lengths = []

    def begin_step(self, lengths: list[int], *, computes: bool) -> list[int]:
        """Returns, for each group, from which place on blocks may have been cached. vLLM caches a block in the step that fills it, and under
        asynchronous scheduling a step or two later. What a load brings it caches when it takes notice of the load's end, however many steps
        later that is. So until the request has computed for a while, every block may be new in the cache."""
        before = self._lengths[0] if len(self._lengths) == _CACHED_LATE else [0] * len(lengths)
        if computes:
            self._lengths = [*self._lengths, lengths][-_CACHED_LATE:]
        return [max(0, one - 1) for one in before]
