"""Which chunks should a pool keep? Hits and writes under several policies, in simulation. Pure.

Engines store everything, and the pool evicts:

- `oracle`: the chunks that are requested again last, or never (Belady's MIN). No policy finds more.
- `lru`: the chunks that were requested longest ago.
- `mooncake`: the same, a tenth of the pool at once.
- `s3fifo`: as local tiers with this policy do.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush

from bench.lib.report import Rows
from bench.lib.trace import Cache, Request, SimulatedLru, measure
from pd_cache.tiers.index import S3FIFO


class Oracle(dict[int, tuple[float, int]]):
    """A cache that knows the future. It first evicts the blocks that are requested last, and of a prompt the
    last block first."""

    def __init__(self, room: int, requests: Sequence[Request]) -> None:
        self._room, self._heap = room, list[tuple[tuple[float, int], int]]()
        self._asked: defaultdict[int, deque[float]] = defaultdict(deque)
        for number, request in enumerate(requests):
            for block in request.whole_blocks:
                self._asked[block].append(number)

    def use(self, blocks: Sequence[int]) -> None:
        for depth, block in enumerate(blocks):
            asked = self._asked[block]
            asked.popleft()
            self[block] = (-asked[0] if asked else -math.inf, -depth)
            heappush(self._heap, (self[block], block))
        while len(self) > self._room:
            rank, block = heappop(self._heap)
            if self.get(block) == rank:
                del self[block]


class S3Fifo(set[int]):
    def __init__(self, room: int) -> None:
        self._room, self._policy = room, S3FIFO(room)

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self:
                self._policy.used(str(block))
                continue
            if len(self) == self._room:
                self.remove(int(self._policy.evict(lambda key: False)))
            self.add(block)
            self._policy.added(str(block))


def compare(requests: Sequence[Request], room: int) -> Rows:
    """Returns a row for each policy, for a pool with room for `room` blocks."""
    pools: dict[str, Cache] = {
        "oracle": Oracle(room, requests),
        "lru": SimulatedLru(room),
        "mooncake": SimulatedLru(room, batch=room // 10),
        "s3fifo": S3Fifo(room),
    }
    return [
        {"capacity_chunks": room, "policy": policy, **measure(requests, pool)._asdict()}
        for policy, pool in pools.items()
    ]
