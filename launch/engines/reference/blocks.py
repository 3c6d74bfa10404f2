"""The blocks of the paged buffer, and the requests and calls that hold them."""

from __future__ import annotations

import threading
from collections import deque


class BlockPool:
    """The free blocks. Thread-safe; never blocks."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._free: deque[int] = deque(range(total))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def allocate(self, count: int) -> BlockLease | None:
        """Returns `count` blocks, held once, or None if there are not that many."""
        with self._lock:
            if count > len(self._free):
                return None
            blocks = tuple(self._free.popleft() for _ in range(count))
            self._used.update(blocks)
        return BlockLease(self, blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free or used, once."""
        with self._lock:
            assert len(self._free) + len(self._used) == self.total, (len(self._free), len(self._used), self.total)
            assert set(self._free) | self._used == set(range(self.total))

    def _give_back(self, blocks: tuple[int, ...]) -> None:
        with self._lock:
            assert self._used.issuperset(blocks), "a block was given back twice"
            self._used.difference_update(blocks)
            self._free.extend(blocks)


class BlockLease:
    """Blocks that are in use by one or more holders: a request, a load into them, a store out of them.

    They return to the pool when the last holder releases them, so a cache call that outlives its request keeps them from being handed to
    another. Thread-safe.
    """

    def __init__(self, pool: BlockPool, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks
        self._pool = pool
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> None:
        """Adds a holder. The caller must be a holder already, or act for one."""
        with self._lock:
            assert self._holders > 0, "blocks were held after they had been given back"
            self._holders += 1

    def release(self) -> None:
        """Removes a holder; call it once for each hold."""
        with self._lock:
            assert self._holders > 0, "blocks were released more often than held"
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._pool._give_back(self.blocks)
