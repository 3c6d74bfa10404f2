"""What a cache of whole blocks would find of a trace's prompts, in simulation. Pure.

A cache is asked for a prompt's blocks and answers how many of them, from the first, it held; afterwards it holds them all, as far as it
has room. The **hit rate** of a trace is the tokens found so, of all prompt tokens: a block that is not full has no name in the
pool, its tokens are in the denominator only, and so are those behind a hole.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from bench.lib.trace import BLOCK_TOKENS, Request
from launch.proxy.prefixes import leading

B = TypeVar("B", bound=Hashable)


class SimulatedLru(Generic[B]):
    """Forgets the blocks used longest ago; of one prompt the last first, since they are of no use without those before."""

    def __init__(self, capacity: int = sys.maxsize) -> None:
        """`capacity` in blocks; by default it never forgets, which is a trace's ideal."""
        self._capacity = capacity
        self._blocks: OrderedDict[B, None] = OrderedDict()
        self.gone: list[B] = []
        """What the last use displaced."""

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def touch(self, blocks: Iterable[B]) -> None:
        """Counts as a use of those that are there."""
        for block in blocks:
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def use(self, blocks: Sequence[B]) -> int:
        found = leading(blocks, self._blocks)
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return found


def hit_rate(requests: Iterable[Request], cache: SimulatedLru[int]) -> float:
    """The hit rate of a trace, from 0 to 1."""
    hit = total = 0
    for request in requests:
        hit += cache.use(request.whole_blocks) * BLOCK_TOKENS
        total += request.input_length
    return hit / total
