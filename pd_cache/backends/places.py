"""Places in a budget, counted by the objects that hold them, so that an interrupt cannot lose one.

No counter is raised and lowered. What is taken is the number of live objects: a place whose holder forgets it, for example because a
user interrupts the holder, is free again when nothing refers to the object any more, as a `Slot` is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

from transfer.locks import Condition

Taken: TypeAlias = "set[weakref.ref[Place]]"

_FORGOTTEN_S = 0.25
"""After how long, at most, a waiting thread notices a place that was forgotten."""


class Place:
    """One of the places in `taken`, until `release`, or until nothing refers to this object any more."""

    __slots__ = ("__weakref__", "_taken")

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        # methods of a set run in C: Python never interrupts one half-way, nor does a collection that comes at a bad moment
        taken.add(weakref.ref(self, taken.discard))

    def release(self) -> None:
        """Give the place back. Idempotent."""
        self._taken.discard(weakref.ref(self))

    @property
    def is_held(self) -> bool:
        """Whether it has not been given back."""
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
        """Take a place, after waiting for one if need be. Returns None if none came free."""
        with self._changed:
            wait_for(self._changed, lambda: len(self._taken) < self._most or not self._useful(), seconds)
            return Place(self._taken) if len(self._taken) < self._most else None

    def give_back(self, place: Place) -> None:
        """Release a place, and wake up those that wait for one. Idempotent."""
        with self._changed:
            place.release()
            self._changed.notify_all()

    def wait_half_free(self, seconds: float) -> bool:
        """Wait until at most half of the places are taken; returns False if that took too long."""
        with self._changed:
            return wait_for(self._changed, lambda: len(self._taken) * 2 <= self._most or not self._useful(), seconds)


def wait_for(changed: Condition, predicate: Callable[[], bool], seconds: float) -> bool:
    """As `changed.wait_for`, for a predicate about places: nobody notifies of one that was forgotten."""
    end = time.monotonic() + seconds
    while not changed.wait_for(predicate, max(0.0, min(_FORGOTTEN_S, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True
