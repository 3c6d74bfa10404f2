"""Eviction policies: LRU, LFU and S3-FIFO behind one interface. Every step is O(1), amortized.

A policy knows only keys. The index reports which keys come, are used and go, and asks for the next victim. A policy is not
thread-safe; the index is. A policy passes over pinned entries. LRU and LFU then treat them as just used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from pd_cache.config import EvictionName

Pinned = Callable[[str], bool]


class EvictionPolicy(ABC):
    """Decides the order in which entries go."""

    @abstractmethod
    def added(self, key: str) -> None:
        """Notes a new key. The policy must not hold it yet."""

    @abstractmethod
    def used(self, key: str) -> None:
        """Notes that a key that the policy holds was read."""

    @abstractmethod
    def removed(self, key: str) -> None:
        """Forgets a key that the policy holds and that went for another reason than eviction."""

    @abstractmethod
    def evict(self, pinned: Pinned) -> str:
        """Chooses a victim, forgets it and returns it. At least one key must not be pinned."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets every key, even if a user interrupted another method half-way."""

    def resize(self, capacity: int) -> None:  # noqa: B027 - most orders do not depend on it
        """Expects at most `capacity` keys from now on."""

    @abstractmethod
    def __len__(self) -> int:
        """How many keys it holds."""


class LRU(EvictionPolicy):
    """Evicts the least recently used key."""

    def __init__(self) -> None:
        # not a plain dict: to find its first key takes ever longer when its head is deleted again and again
        self._order: OrderedDict[str, None] = OrderedDict()

    def added(self, key: str) -> None:
        self._order[key] = None

    def used(self, key: str) -> None:
        self._order.move_to_end(key)

    def removed(self, key: str) -> None:
        del self._order[key]

    def evict(self, pinned: Pinned) -> str:
        return _first_unpinned(self._order, pinned)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)


class LFU(EvictionPolicy):
    """Evicts the least frequently used key, and the least recently used among equals. Counts up to 63 uses."""

    _MOST = 63

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}
        self._by_uses: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(self._MOST + 1)]

    def clear(self) -> None:
        self._uses.clear()
        for keys in self._by_uses:
            keys.clear()

    def added(self, key: str) -> None:
        self._uses[key] = 0
        self._by_uses[0][key] = None

    def used(self, key: str) -> None:
        before = self._uses[key]
        after = self._uses[key] = min(before + 1, self._MOST)
        del self._by_uses[before][key]
        self._by_uses[after][key] = None

    def removed(self, key: str) -> None:
        del self._by_uses[self._uses.pop(key)][key]

    def evict(self, pinned: Pinned) -> str:
        for keys in self._by_uses:
            for _ in range(len(keys)):
                key = next(iter(keys))
                if not pinned(key):
                    self.removed(key)
                    return key
                keys.move_to_end(key)
        raise AssertionError("evict() expects an entry that is not pinned")

    def __len__(self) -> int:
        return len(self._uses)


class S3FIFO(EvictionPolicy):
    """Keeps three queues: a small one for new keys, a main one for keys that were used there, and a ghost queue of keys that were not.

    "FIFO queues are all you need for cache eviction", Yang et al., SOSP 2023. One-off prompts pass through the small queue
    without pushing out what is used again and again.
    """

    _MOST = 3

    def __init__(self, capacity: int) -> None:
        """`capacity`: the most entries that there will be. The small queue gets a tenth of it."""
        self._small: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghost: OrderedDict[str, None] = OrderedDict()
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        self._small_target = max(1, capacity // 10)
        self._ghosts = max(1, capacity - self._small_target)
        while len(self._ghost) > self._ghosts:
            self._ghost.popitem(last=False)

    def clear(self) -> None:
        for queue in (self._small, self._main, self._ghost):
            queue.clear()

    def added(self, key: str) -> None:
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def used(self, key: str) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self._MOST)

    def removed(self, key: str) -> None:
        if self._small.pop(key, None) is None:
            del self._main[key]

    def evict(self, pinned: Pinned) -> str:
        tries = (self._MOST + 1) * len(self._main)  # after these, every key left in the main queue is pinned
        while True:
            if self._small and (len(self._small) >= self._small_target or tries <= 0):
                key = self._from_small(pinned)
            else:
                key = self._from_main(pinned)
                tries -= 1
            if key is not None:
                return key

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _from_small(self, pinned: Pinned) -> str | None:
        key, uses = self._small.popitem(last=False)
        if uses > 1 or pinned(key):
            self._main[key] = 0
            return None
        self._ghost[key] = None
        if len(self._ghost) > self._ghosts:
            self._ghost.popitem(last=False)
        return key

    def _from_main(self, pinned: Pinned) -> str | None:
        key, uses = self._main.popitem(last=False)
        if not uses and not pinned(key):
            return key
        self._main[key] = max(0, uses - 1)
        return None


def make_policy(name: EvictionName, capacity: int) -> EvictionPolicy:
    """Returns the policy of that name, for at most `capacity` entries."""
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    return S3FIFO(capacity)


def _first_unpinned(order: OrderedDict[str, None], pinned: Pinned) -> str:
    while True:
        key = next(iter(order))
        if not pinned(key):
            del order[key]
            return key
        order.move_to_end(key)  # it is pinned, so it counts as just used
