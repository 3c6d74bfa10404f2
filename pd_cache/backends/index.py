"""What a tier holds: keys, where their bytes are, which of them are being read, and which goes next. No I/O, no waiting.

Each entry takes one of `capacity` places. `reserve` makes room for an entry that is still to come, by evicting others; `fill` puts it
in, or `cancel` gives the room back. Pinned entries are being read: they are neither evicted nor removed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from pd_cache.backends.eviction import EvictionPolicy

R = TypeVar("R")


class Entry(Generic[R]):
    """One key. `resource` is where its bytes are, and they stay there for as long as the entry is pinned."""

    __slots__ = ("key", "pins", "resource")

    def __init__(self, key: str, resource: R) -> None:
        self.key = key
        self.resource = resource
        self.pins = 0


class Room(enum.Enum):
    """Whether there is room for a key."""

    RESERVED = "reserved"
    PRESENT = "present"
    """The key is there already."""
    NONE = "none"
    """Every entry is being read, or the capacity is 0."""


class Reservation(NamedTuple, Generic[R]):
    """Outcome of `reserve`, and the resources that nobody needs any more."""

    room: Room
    evicted: list[R]


class Removal(enum.Enum):
    """Outcome of `remove`."""

    REMOVED = "removed"
    MISSING = "missing"
    PINNED = "pinned"


class EvictingIndex(Generic[R]):
    """At most `capacity` entries. Thread-safe."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self._over = 0
        """How many entries are still there although their places are gone: see `shrink`."""
        self._policy = policy
        self._entries: dict[str, Entry[R]] = {}
        self._lock = threading.Lock()
        self._reserved = 0
        self._pinned = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there. Says nothing about use."""
        with self._lock:
            entries = self._entries
            return [key in entries for key in keys]

    def pin(self, key: str) -> Entry[R] | None:
        """The entry, kept until `unpin`; None if there is none. Counts as a use."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if not entry.pins:
                self._pinned += 1
            entry.pins += 1
            self._policy.used(key)
            return entry

    def unpin(self, entry: Entry[R]) -> bool:
        """End one reader's use. Returns True to the last reader of an entry that is gone: it has to let go of the resource."""
        with self._lock:
            assert entry.pins > 0, f"{entry.key} was unpinned more often than it was pinned"
            entry.pins -= 1
            if entry.pins:
                return False
            if self._entries.get(entry.key) is not entry:
                return True
            self._pinned -= 1
            return False

    def reserve(self, key: str) -> Reservation[R]:
        """Make room for a key that is to come, unless it is there already. Each reservation ends with `fill` or `cancel`."""
        with self._lock:
            if key in self._entries:
                self._policy.used(key)
                return Reservation(Room.PRESENT, [])
            evicted: list[R] = []
            while len(self._entries) + self._reserved >= self.capacity:
                if self._closed or len(self._entries) <= self._pinned:
                    return Reservation(Room.NONE, evicted)
                evicted.append(self._entries.pop(self._policy.evict(self._is_pinned)).resource)
            if self._closed:
                return Reservation(Room.NONE, evicted)
            self._reserved += 1
            self._over = 0
            return Reservation(Room.RESERVED, evicted)

    def fill(self, key: str, resource: R) -> bool:
        """Put the reserved key in. Returns False, and does not keep the resource, if the key is there already or it is too late."""
        with self._lock:
            self._reserved -= 1
            if self._closed or key in self._entries:
                return False
            self._entries[key] = Entry(key, resource)
            self._policy.added(key)
            return True

    def cancel(self) -> None:
        """Give a reservation back."""
        with self._lock:
            self._reserved -= 1

    def remove(self, key: str) -> tuple[Removal, R | None]:
        """Take a key out, with its resource, unless somebody reads it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return Removal.MISSING, None
            if entry.pins:
                return Removal.PINNED, None
            del self._entries[key]
            self._policy.removed(key)
            return Removal.REMOVED, entry.resource

    def discard(self, entry: Entry[R]) -> None:
        """Take out an entry that turned out to be damaged, although the caller has it pinned."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self._policy.removed(entry.key)
                self._pinned -= 1

    def give_up(self) -> R | None:
        """Evict one entry, and lower `capacity` to what is held then. Returns None if every entry is being read."""
        with self._lock:
            if self._closed or len(self._entries) <= self._pinned:
                return None
            resource = self._entries.pop(self._policy.evict(self._is_pinned)).resource
            self._resize(len(self._entries) + self._reserved)
            return resource

    def shrink(self) -> None:
        """Take away one place. The entry too many goes with the next reservation, not before: it can be read meanwhile."""
        with self._lock:
            self._resize(max(0, self.capacity - 1))
            self._over = max(0, len(self._entries) + self._reserved - self.capacity)

    def grow(self, places: int, most: int) -> None:
        """Make `capacity` `places` more than what is held, but not less than it was, and not more than `most`."""
        with self._lock:
            self._resize(min(most, max(self.capacity, len(self._entries) + self._reserved + places)))

    def clear(self) -> None:
        """Forget every entry: their resources are gone. Readers keep what they hold."""
        with self._lock:
            self._forget()

    def close(self) -> list[R]:
        """Accept nothing any more, and forget everything. Returns the resources of entries that nobody reads."""
        with self._lock:
            self._closed = True
            resources = [entry.resource for entry in self._entries.values() if not entry.pins]
            self._forget()
            return resources

    def check_integrity(self) -> None:
        """Assert the invariants (for tests)."""
        with self._lock:
            assert len(self._policy) == len(self._entries)
            assert len(self._entries) + self._reserved <= max(self.capacity, 0) + self._over
            assert self._pinned == sum(entry.pins > 0 for entry in self._entries.values())
            assert self._reserved >= 0

    def _forget(self) -> None:
        for key in self._entries:
            self._policy.removed(key)
        self._entries.clear()
        self._pinned = 0

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._policy.resize(capacity)

    def _is_pinned(self, key: str) -> bool:
        return self._entries[key].pins > 0
