"""Places in a budget. An interrupt cannot lose one.

Each place that is taken is an object, and a budget counts these objects. If the holder forgets a place, for example because a user
interrupts it, the place is free again as soon as nothing refers to the object. A `Slot` works the same way.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

from transfer.locks import Condition

Taken: TypeAlias = "set[weakref.ref[Place]]"

_FORGOTTEN_S = 0.25
"""The longest time until a waiting thread notices a place that was forgotten."""


class Place:
    """One of the places in `taken`, until `release`, or until nothing refers to this object any more."""

    __slots__ = ("__weakref__", "_taken")

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        # methods of a set run in C: neither a signal nor a garbage collection interrupts one half-way
        taken.add(weakref.ref(self, taken.discard))

    def release(self) -> None:
        """Gives the place back. Idempotent."""
        self._taken.discard(weakref.ref(self))

    @property
    def is_held(self) -> bool:
        """Whether the place has not been given back yet."""
        return weakref.ref(self) in self._taken


class Share:
    """Limits how many slots the calls of one kind may hold. Waiting for a place ends early if the tier becomes unusable."""

    def __init__(self, most: int, changed: Condition, useful: Callable[[], bool]) -> None:
        self._most = max(1, most)
        self._taken: Taken = set()
        self._changed = changed
        self._useful = useful

    def __len__(self) -> int:
        """How many places are taken."""
        return len(self._taken)

    def take(self, seconds: float) -> Place | None:
        """Takes a place, waiting up to `seconds` for one. Returns None if none came free."""
        with self._changed:
            wait_for(self._changed, lambda: len(self._taken) < self._most or not self._useful(), seconds)
            return Place(self._taken) if len(self._taken) < self._most else None

    def give_back(self, place: Place) -> None:
        """Releases a place and wakes the threads that wait for one. Idempotent."""
        with self._changed:
            place.release()
            self._changed.notify_all()

    def wait_half_free(self, seconds: float) -> bool:
        """Waits until at most half of the places are taken. Returns False after `seconds`."""
        with self._changed:
            return wait_for(self._changed, lambda: len(self._taken) * 2 <= self._most or not self._useful(), seconds)


def wait_for(changed: Condition, predicate: Callable[[], bool], seconds: float) -> bool:
    """Does the same as `changed.wait_for` for a predicate about places. It polls, because a forgotten place notifies nothing."""
    end = time.monotonic() + seconds
    while not changed.wait_for(predicate, max(0.0, min(_FORGOTTEN_S, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True
