"""EvictingIndex: a tier's keys, where their bytes are, which keys are being read, and which key is evicted
next. No I/O, no waiting.

Each entry takes one of `capacity` places. `reserve` makes room for a new entry, and evicts others if
necessary. Then the caller adds the entry with `fill`, or gives the place back with `unreserve`. Pinned
entries are being read: they are neither evicted nor removed.

An eviction policy (LRU, LFU or S3-FIFO) decides which entry is evicted. It knows only keys: the index reports
which keys are added, used and removed, and asks for the next victim. A policy passes over pinned entries; LRU
and LFU then treat them as just used. Every step is O(1), amortized.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from pd_cache.chunks import Keys
from pd_cache.config import EvictionName
from transfer.errors import Status

R = TypeVar("R")


class Entry(Generic[R]):
    """A key. `resource` says where its bytes are. They stay there for as long as the entry is pinned."""

    __slots__ = ("key", "pins", "resource")

    def __init__(self, key: str, resource: R) -> None:
        self.key = key
        self.resource = resource
        self.pins = 0


class Reservation(NamedTuple, Generic[R]):
    """The outcome of `reserve`."""

    refusal: Status | None
    """None if a place is reserved; OK if the key is already there, NO_SPACE if every entry is being read or
    the capacity is 0, or CLOSED."""
    evicted: list[R]
    """The resources of evicted entries, which the caller must release."""


class EvictingIndex(Generic[R]):
    """Holds at most `capacity` entries. Thread-safe."""

    def __init__(self, capacity: int, policy: EvictionName) -> None:
        self.capacity = capacity
        self._policy_name: EvictionName = policy
        self._policy = make_policy(policy, capacity)
        self._entries: dict[str, Entry[R]] = {}
        self._lock = threading.Lock()
        self._reserved = 0
        self._pinned = 0
        """How many of the entries are pinned."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, keys: Keys) -> list[bool]:
        """Returns, for each key, whether it is there. Does not count as a use."""
        with self._lock:
            entries = self._entries
            return [key in entries for key in keys]

    def pin(self, key: str) -> Entry[R] | None:
        """Returns an entry, and keeps it until `unpin`; None if there is none. Counts as a use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._policy.used(key)
                self._pinned += not entry.pins
                entry.pins += 1
            return entry

    def unpin(self, entry: Entry[R]) -> bool:
        """Ends a reader's use. Returns True if the entry was removed and this was its last reader; the caller
        must then release the resource."""
        with self._lock:
            entry.pins -= 1
            if entry.pins:
                return False
            there = self._entries.get(entry.key) is entry
            self._pinned -= there
            return not there

    def reserve(self, key: str) -> Reservation[R]:
        """Makes room for a new key, unless it is already there. The caller must `fill` or `unreserve` a
        reserved place."""
        with self._lock:
            if key in self._entries:
                self._policy.used(key)
                return Reservation(Status.OK, [])
            evicted: list[R] = []
            while len(self._entries) + self._reserved >= self.capacity:
                if self._closed or self._pinned == len(self._entries):
                    return Reservation(Status.CLOSED if self._closed else Status.NO_SPACE, evicted)
                evicted.append(self._entries.pop(self._policy.evict(self._is_pinned)).resource)
            if self._closed:
                return Reservation(Status.CLOSED, evicted)
            self._reserved += 1
            return Reservation(None, evicted)

    def unreserve(self) -> None:
        """Gives a reserved place back."""
        with self._lock:
            self._reserved -= 1

    def fill(self, key: str, resource: R) -> bool:
        """Puts a key into a reserved place. Returns False, without keeping the resource, if the key is
        already there or the index is closed."""
        with self._lock:
            self._reserved -= 1
            if self._closed or key in self._entries:
                return False
            self._entries[key] = Entry(key, resource)
            self._policy.added(key)
            return True

    def remove(self, key: str) -> R | Status:
        """Takes a key out. Returns its resource, which the caller must release; MISSING if there is none,
        BUSY if it is being read."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return Status.MISSING
            if entry.pins:
                return Status.BUSY
            self._take_out(entry)
            return entry.resource

    def discard(self, entry: Entry[R]) -> None:
        """Takes out a damaged entry, which the caller has pinned."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                self._take_out(entry)
                self._pinned -= 1

    def clear(self) -> None:
        """Forgets every entry, because their resources are gone. Readers keep their entries."""
        with self._lock:
            self._forget()

    def close(self) -> list[R]:
        """Forgets every entry and accepts no more. Returns the resources of the entries that are not being
        read."""
        with self._lock:
            self._closed = True
            resources = [entry.resource for entry in self._entries.values() if not entry.pins]
            self._forget()
            return resources

    @property
    def held(self) -> int:
        """How many entries are pinned and places reserved (for tests)."""
        with self._lock:
            return self._pinned + self._reserved

    def check_integrity(self) -> None:
        """Asserts the invariants (for tests)."""
        with self._lock:
            assert len(self._policy) == len(self._entries)
            assert 0 <= len(self._entries) + self._reserved <= self.capacity
            assert self._pinned == sum(map(self._is_pinned, self._entries))

    def _take_out(self, entry: Entry[R]) -> None:
        del self._entries[entry.key]
        self._policy.removed(entry.key)

    def _forget(self) -> None:
        self._entries.clear()
        self._policy = make_policy(self._policy_name, self.capacity)
        self._pinned = 0

    def _is_pinned(self, key: str) -> bool:
        return self._entries[key].pins > 0


# --- which entry goes ---------------------------------------------------------------------------------------
#
# The index reports each key that is `added`, `used`, or `removed` for another reason than eviction. `evict`
# chooses a victim among the keys that are not pinned, and forgets it. There must be such a key. Not
# thread-safe.

Pinned = Callable[[str], bool]
_MOST_USES = 63
"""The most uses that LFU counts."""


class Counting:
    """LRU and LFU: evicts the least frequently used key, and the least recently used among equals. Counts up
    to `most` uses; LRU counts none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._uses: dict[str, int] = {}
        # no plain dicts: if the first key of a dict is deleted again and again, finding the first key takes
        # ever longer
        self._by_uses: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(most + 1)]

    def added(self, key: str) -> None:
        self._uses[key] = 0
        self._by_uses[0][key] = None

    def used(self, key: str) -> None:
        before = self._uses[key]
        after = self._uses[key] = min(before + 1, self._most)
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


class S3FIFO:
    """Keeps three queues: a small queue for new keys, a main queue for keys that were used there, and a ghost
    queue of keys that were not.

    "FIFO queues are all you need for cache eviction", Yang et al., SOSP 2023. One-off prompts pass through
    the small queue, and push out no key that is used again and again.
    """

    _MOST = 3

    def __init__(self, capacity: int) -> None:
        """`capacity`: the most entries. The small queue gets a tenth of them."""
        self._small: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghost: OrderedDict[str, None] = OrderedDict()
        self._small_target = max(1, capacity // 10)
        self._ghosts = max(1, capacity - self._small_target)

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


def make_policy(name: EvictionName, capacity: int) -> Counting | S3FIFO:
    """Returns the policy of that name, for at most `capacity` entries."""
    return S3FIFO(capacity) if name == "s3fifo" else Counting(0 if name == "lru" else _MOST_USES)
