"""Which chunks should a pool keep? Hits and writes under several policies, in simulation. Pure.

Under four policies, engines store everything, and the pool evicts:

- `oracle`: the chunks that are requested again last, or never (Belady's MIN). No policy finds more.
- `mooncake`: the chunks that were requested longest ago, a tenth of the pool at once.
- `s3fifo`: as local tiers with this policy do.
- `tinylfu` (W-TinyLFU): a block that leaves the window meets the oldest block on trial; the one with fewer
  requests goes.

Under the others, the pool is an LRU, and engines store:

- `lru`: everything.
- `second_sight`: the chunks that were requested from them before. With eight engines (`second_sight_of_8`),
  each prompt goes to a random engine.
- `shallow`: the first 64 blocks of a prompt.
- `cut`: the blocks after the found prefix, each with a probability of 0.95, up to the first block that is
  left out.

Engines and `tinylfu` count requests exactly; a real sketch of fixed size would be less exact. Hand-offs,
whose chunks must be stored, are not simulated.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any

from bench.lib.trace import Cache, Request, SimulatedLru, measure
from pd_cache.tiers.index import S3FIFO


class Oracle(dict[int, tuple[float, int]]):
    """Its blocks, in the order of eviction: blocks that are requested last go first, and within a prompt its
    end goes first."""

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


class TinyLfu(dict[int, OrderedDict[int, None]]):
    """Its blocks, and the part of the cache that each is in. A block on trial becomes safe when it is
    found."""

    def __init__(self, room: int) -> None:
        self._room, self._asked, self._count = room, Counter[int](), 0
        self._window, self._trial, self._safe = (OrderedDict[int, None]() for _ in range(3))

    def use(self, blocks: Sequence[int]) -> None:
        self._asked.update(blocks)
        self._count += len(blocks)
        if self._count > 10 * self._room:  # what was asked for long ago counts less and less
            self._asked = Counter({block: asked // 2 for block, asked in self._asked.items() if asked > 1})
            self._count //= 2
        for block in reversed(blocks):
            new = self.get(block, self._window) is self._window
            self._move(block, self._window if new else self._safe)
            if len(self._safe) > 0.8 * self._room:
                self._move(next(iter(self._safe)), self._trial)
            if len(self._window) > 0.01 * self._room:
                self._move(next(iter(self._window)), self._trial)
            if len(self) > self._room:
                ends = next(iter(self._trial)), next(reversed(self._trial))
                loser = min(reversed(ends), key=self._asked.__getitem__)
                del self.pop(loser)[loser]

    def _move(self, block: int, part: OrderedDict[int, None]) -> None:
        self.pop(block, part).pop(block, None)
        self[block] = part
        part[block] = None


def second_sight(
    rng: Random, memories: Sequence[SimulatedLru[int]], blocks: Sequence[int], found: int
) -> Sequence[int]:
    memory = rng.choice(memories)
    known = [block for block in blocks if block in memory]
    memory.use(blocks)
    return known


def cut(rng: Random, blocks: Sequence[int], found: int) -> Sequence[int]:
    while found < len(blocks) and rng.random() < 0.95:
        found += 1
    return blocks[:found]


def compare(requests: Sequence[Request], room: int) -> list[dict[str, Any]]:
    """Returns a row for each policy, for a pool with room for `room` blocks."""
    pools: dict[str, Cache] = {
        "oracle": Oracle(room, requests),
        "mooncake": SimulatedLru[int](room, batch=room // 10),
        "s3fifo": S3Fifo(room),
        "tinylfu": TinyLfu(room),
    }
    engines = {
        "lru": None,
        "second_sight": partial(second_sight, Random(0), [SimulatedLru[int]()]),
        "second_sight_of_8": partial(second_sight, Random(0), [SimulatedLru[int]() for _ in range(8)]),
        "shallow": lambda blocks, found: blocks[:64],
        "cut": partial(cut, Random(0)),
    }
    return [
        {"capacity_chunks": room, "policy": policy}
        | measure(requests, pools.get(policy, SimulatedLru[int](room)), engines.get(policy))._asdict()
        for policy in (*pools, *engines)
    ]
