"""What a tier holds: keys, where their bytes are, which of them are being read, and which goes next. No I/O, no waiting.

Each entry takes one of `capacity` places. `reserve` makes room for an entry that is still to come, by evicting others; `fill` puts it
in, or the place is released. Pinned entries are being read: they are neither evicted nor removed.

A user may interrupt any of these methods at any step. Pins and reserved places are objects (`places.py`). `_entries` is changed in
single steps; if an interrupt leaves the policy behind it, the next call brings them together again.
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
    """One key. `resource` is where its bytes are, and they stay there for as long as the entry is pinned."""

    __slots__ = ("key", "pins", "resource")

    def __init__(self, key: str, resource: R) -> None:
        self.key = key
        self.resource = resource
        self.pins: Taken | None = None


class Pin(Place, Generic[R]):
    """One reader's use of an entry. Ends with `unpin`, or when nothing refers to it any more."""

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
    """The key is there already."""
    NONE = "none"
    """Every entry is being read, or the capacity is 0."""


class Reservation(NamedTuple, Generic[R]):
    """Outcome of `reserve`, and the resources that nobody needs any more."""

    room: Room
    evicted: list[R]
    place: Place | None = None
    """The place that is reserved."""


class Removal(enum.Enum):
    """Outcome of `remove`."""

    REMOVED = "removed"
    MISSING = "missing"
    PINNED = "pinned"


def _whole(
    method: Callable[Concatenate[EvictingIndex[R], P], T],
) -> Callable[Concatenate[EvictingIndex[R], P], T]:
    """Runs a method with the lock held. If it is interrupted, the next one begins by mending what it left."""

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
    """At most `capacity` entries. Thread-safe."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self._over = 0
        """How many entries are still there although their places are gone: see `shrink`."""
        self._policy = policy
        self._entries: dict[str, Entry[R]] = {}
        self._lock = threading.Lock()
        self._torn = False
        """Whether the last change was interrupted, so that the policy may not know the same keys."""
        self._reserved: Taken = set()
        self._pins: Taken = set()
        """One for each pin of any entry, also of those that are gone."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there. Says nothing about use."""
        with self._lock:
            entries = self._entries
            return [key in entries for key in keys]

    @_whole
    def pin(self, key: str) -> Pin[R] | None:
        """Keeps an entry until `unpin`; None if there is none. Counts as a use."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._policy.used(key)
        if entry.pins is None:
            entry.pins = set()
        return Pin(entry, entry.pins, Place(self._pins))

    @_whole
    def unpin(self, pin: Pin[R]) -> bool:
        """End one reader's use. Returns True to the last reader of an entry that is gone: it has to let go of the resource."""
        if not pin.is_held:
            return False
        pin.release()
        pin.use.release()
        return not pin.entry.pins and self._entries.get(pin.entry.key) is not pin.entry

    @_whole
    def reserve(self, key: str) -> Reservation[R]:
        """Make room for a key that is to come, unless it is there already. The reserved place is for `fill`; if there is nothing to fill in, it
        is released."""
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
        """Put a key into a reserved place. Returns False, and does not keep the resource, if the key is there already or it is too
        late."""
        place.release()
        if self._closed or key in self._entries:
            return False
        self._entries[key] = Entry(key, resource)
        self._policy.added(key)
        return True

    @_whole
    def remove(self, key: str, let_go: Callable[[R], object]) -> Removal:
        """Take a key out, unless somebody reads it. `let_go` gets its resource; if that is a function in C, no interrupt comes between
        these two steps."""
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
        """Take out an entry that turned out to be damaged, although the caller has it pinned."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._policy.removed(entry.key)

    @_whole
    def give_up(self) -> R | None:
        """Evict one entry, and lower `capacity` to what is held then. Returns None if every entry is being read."""
        if self._closed or self._all_are_pinned:
            return None
        resource = self._entries.pop(self._policy.evict(self._is_pinned)).resource
        self._resize(len(self._entries) + len(self._reserved))
        return resource

    @_whole
    def shrink(self, most: int) -> None:
        """Leave `most` places at most. Entries too many go with the next reservation, not before: they can be read meanwhile."""
        self._resize(max(0, min(self.capacity, most)))
        self._over = max(0, len(self._entries) + len(self._reserved) - self.capacity)

    @_whole
    def grow(self, places: int, most: int) -> None:
        """Make `capacity` `places` more than what is held, but not less than it was, and not more than `most`."""
        self._resize(min(most, max(self.capacity, len(self._entries) + len(self._reserved) + places)))

    @_whole
    def clear(self) -> None:
        """Forget every entry: their resources are gone. Readers keep what they hold."""
        self._forget()

    @_whole
    def close(self) -> list[R]:
        """Accept nothing any more, and forget everything. Returns the resources of entries that nobody reads."""
        self._closed = True
        resources = [entry.resource for entry in self._entries.values() if not entry.pins]
        self._forget()
        return resources

    @_whole
    def check_integrity(self) -> None:
        """Assert the invariants (for tests)."""
        assert len(self._policy) == len(self._entries)
        assert len(self._entries) + len(self._reserved) <= max(self.capacity, 0) + self._over
        assert len(self._pins) >= sum(map(self._is_pinned, self._entries))

    def _mend(self) -> None:
        """Teach the policy the keys that there are. It begins its order anew."""
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
