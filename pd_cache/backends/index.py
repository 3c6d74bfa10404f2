"""EvictingIndex: a tier's keys, where their bytes are, which of them are being read, and which goes next. No I/O, no waiting.

Each entry takes one of `capacity` places. `reserve` makes room for an entry that is still to come, by evicting others. `fill` puts the
entry in; without it, the place must be released. Pinned entries are being read: they are neither evicted nor removed.

A user may interrupt any of these methods at any step. Pins and reserved places are objects (`places.py`). `_entries` changes in single
steps. If an interrupt comes before the policy has learned of a change, the next call teaches it the keys anew.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from pd_cache.backends.eviction import EvictionPolicy
from pd_cache.backends.places import Place, Taken

R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")


class Entry(Generic[R]):
    """One key. `resource` says where its bytes are. They stay there for as long as the entry is pinned."""

    __slots__ = ("failures", "key", "pins", "resource")

    def __init__(self, key: str, resource: R) -> None:
        self.key = key
        self.resource = resource
        self.pins: Taken | None = None
        self.failures = 0
        """How many readers in a row found the payload damaged. Once may be the memory it was read into; twice is the entry."""

    @property
    def damaged(self) -> bool:
        """Whether the entry should be discarded."""
        return self.failures >= 2


class Pin(Place, Generic[R]):
    """One reader's use of an entry. It ends with `unpin`, or when nothing refers to it any more."""

    __slots__ = ("entry", "use")

    def __init__(self, entry: Entry[R], pins: Taken, use: Place) -> None:
        """`use` counts among the pins of the whole index; nothing else refers to it."""
        self.entry = entry
        self.use = use
        super().__init__(pins)


class Room(enum.Enum):
    """Whether there is room for a key."""

    RESERVED = "reserved"
    PRESENT = "present"
    """The key is already there."""
    NONE = "none"
    """Every entry is being read, or the capacity is 0."""


class Reservation(NamedTuple, Generic[R]):
    """The outcome of `reserve`, and the resources of evicted entries, which the caller must let go of."""

    room: Room
    evicted: list[R]
    place: Place | None = None
    """The place that is reserved."""


class Removal(enum.Enum):
    """The outcome of `remove`."""

    REMOVED = "removed"
    MISSING = "missing"
    PINNED = "pinned"


def _whole(
    method: Callable[Concatenate[EvictingIndex[R], P], T],
) -> Callable[Concatenate[EvictingIndex[R], P], T]:
    """Runs a method with the lock held. If it is interrupted, the next method first repairs the index."""

    @functools.wraps(method)
    def call(self: EvictingIndex[R], /, *arguments: P.args, **options: P.kwargs) -> T:
        with self._lock:
            try:
                if self._torn:
                    self._mend()
                return method(self, *arguments, **options)
            except BaseException:
                self._torn = True
                raise

    return call


class EvictingIndex(Generic[R]):
    """Holds at most `capacity` entries. Thread-safe."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self._over = 0
        """How many entries may still be there although their places are gone: see `shrink`."""
        self._policy = policy
        self._entries: dict[str, Entry[R]] = {}
        self._lock = threading.Lock()
        self._torn = False
        """Whether the last change was interrupted, so that the policy may know other keys than `_entries`."""
        self._reserved: Taken = set()
        self._pins: Taken = set()
        """One for each pin of any entry, including entries that are gone."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Returns, for each key, whether it is there. Does not count as a use."""
        with self._lock:
            entries = self._entries
            return [key in entries for key in keys]

    @_whole
    def pin(self, key: str) -> Pin[R] | None:
        """Keeps an entry until `unpin`. Returns None if there is none. Counts as a use."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._policy.used(key)
        if entry.pins is None:
            entry.pins = set()
        return Pin(entry, entry.pins, Place(self._pins))

    @_whole
    def unpin(self, pin: Pin[R]) -> bool:
        """Ends one reader's use. Returns True if the entry is gone and this was its last reader, which must then let go of the resource."""
        if not pin.is_held:
            return False
        pin.release()
        pin.use.release()
        return not pin.entry.pins and self._entries.get(pin.entry.key) is not pin.entry

    @_whole
    def reserve(self, key: str) -> Reservation[R]:
        """Makes room for a key that is to come, unless it is already there. The caller must pass the reserved place to `fill` or release it."""
        if key in self._entries:
            self._policy.used(key)
            return Reservation(Room.PRESENT, [])
        evicted: list[R] = []
        while len(self._entries) + len(self._reserved) >= self.capacity:
            if self._closed or self._all_are_pinned:
                return Reservation(Room.NONE, evicted)
            evicted.append(self._entries.pop(self._policy.evict(self._is_pinned)).resource)
        if self._closed:
            return Reservation(Room.NONE, evicted)
        self._over = 0
        return Reservation(Room.RESERVED, evicted, Place(self._reserved))

    @_whole
    def fill(self, place: Place, key: str, resource: R) -> bool:
        """Puts a key into a reserved place. Returns False, without keeping the resource, if the key is already there or the index is closed."""
        place.release()
        if self._closed or key in self._entries:
            return False
        self._entries[key] = Entry(key, resource)
        self._policy.added(key)
        return True

    @_whole
    def remove(self, key: str, let_go: Callable[[R], object]) -> Removal:
        """Takes a key out, unless it is being read, and passes its resource to `let_go`.

        If `let_go` is a function in C, no interrupt comes between these two steps.
        """
        entry = self._entries.get(key)
        if entry is None:
            return Removal.MISSING
        if entry.pins:
            return Removal.PINNED
        resource = entry.resource
        del self._entries[key]
        let_go(resource)
        self._policy.removed(key)
        return Removal.REMOVED

    @_whole
    def discard(self, entry: Entry[R]) -> None:
        """Takes out a damaged entry, which the caller has pinned."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._policy.removed(entry.key)

    @_whole
    def give_up(self) -> R | None:
        """Evicts one entry, lowers `capacity` to what is then held, and returns the resource; None if every entry is being read."""
        if self._closed or self._all_are_pinned:
            return None
        resource = self._entries.pop(self._policy.evict(self._is_pinned)).resource
        self._resize(len(self._entries) + len(self._reserved))
        return resource

    @_whole
    def shrink(self, most: int) -> None:
        """Leaves at most `most` places. Surplus entries can be read until the next reservation evicts them."""
        self._resize(max(0, min(self.capacity, most)))
        self._over = max(0, len(self._entries) + len(self._reserved) - self.capacity)

    @_whole
    def grow(self, places: int, most: int) -> None:
        """Raises `capacity` to `places` more than what is held, but never above `most`."""
        self._resize(min(most, max(self.capacity, len(self._entries) + len(self._reserved) + places)))

    @_whole
    def clear(self) -> None:
        """Forgets every entry, because their resources are gone. Readers keep what they hold."""
        self._forget()

    @_whole
    def close(self) -> list[R]:
        """Forgets every entry and accepts no more. Returns the resources of the entries that are not being read."""
        self._closed = True
        resources = [entry.resource for entry in self._entries.values() if not entry.pins]
        self._forget()
        return resources

    @_whole
    def check_integrity(self) -> None:
        """Asserts the invariants (for tests)."""
        assert len(self._policy) == len(self._entries)
        assert len(self._entries) + len(self._reserved) <= max(self.capacity, 0) + self._over
        assert len(self._pins) >= sum(map(self._is_pinned, self._entries))

    def _mend(self) -> None:
        """Teaches the policy the present keys. It begins its order anew."""
        self._policy.clear()
        for key in self._entries:
            self._policy.added(key)
        self._torn = False

    def _forget(self) -> None:
        self._entries.clear()
        self._policy.clear()

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._policy.resize(capacity)

    @property
    def _all_are_pinned(self) -> bool:
        return len(self._entries) <= len(self._pins) and all(map(self._is_pinned, self._entries))

    def _is_pinned(self, key: str) -> bool:
        return bool(self._entries[key].pins)
