"""WorkQueue: a bounded queue of the clients' work for threads that do it, first come, first served."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Item(NamedTuple, Generic[T]):
    client: str
    work: T
    until: float
    """When it is too late to take the item; `expire` compares it with the time that it is given."""


class WorkQueue(Generic[T]):
    """Holds items that wait, and counts those that run. Thread-safe.

    At most `limit` items wait or run, and a client may have as many as it leaves free, so a client alone gets half of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Item[T]] = deque()
        self._held: Counter[str] = Counter()
        """How many items of each client wait or run."""
        self._something = threading.Condition()
        self._closed = False
        self.in_flight = 0
        """How many items wait or run."""

    def put(self, item: Item[T]) -> bool:
        """Queues an item. Returns False if there is no place for it."""
        with self._something:
            if self._closed or self._held[item.client] >= self._limit - self.in_flight:
                return False
            self._held[item.client] += 1
            self.in_flight += 1
            self._waiting.append(item)
            self._something.notify()
            return True

    def put_back(self, item: Item[T]) -> bool:
        """Queues the rest of an item that was taken, behind all others. Returns False if the queue is closed.

        If it returns True, the item keeps its place, and the caller must not pass it to `finished`.
        """
        with self._something:
            if not self._closed:
                self._waiting.append(item)
                self._something.notify()
            return not self._closed

    def take(self, most: int = 1) -> list[Item[T]]:
        """Waits for an item, and returns up to `most` of those that wait. Returns none once the queue is closed.

        The caller must pass each of them to `finished` in the end.
        """
        with self._something:
            self._something.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return []
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def finished(self, item: Item[T]) -> None:
        """Frees the place of an item that was taken."""
        with self._something:
            self._release(item)

    def expire(self, now: float) -> list[Item[T]]:
        """Removes and returns the waiting items whose `until` has passed."""
        return self._remove(lambda item: item.until <= now)

    def discard(self, client: str) -> list[Item[T]]:
        """Removes and returns a client's waiting items."""
        return self._remove(lambda item: item.client == client)

    def close(self) -> list[Item[T]]:
        """Makes every `take` return nothing from now on. Returns the items that still waited."""
        with self._something:
            self._closed = True
            self._something.notify_all()
            return list(self._waiting)

    def _remove(self, unwanted: Callable[[Item[T]], bool]) -> list[Item[T]]:
        with self._something:
            removed = [item for item in self._waiting if unwanted(item)]
            if removed:
                self._waiting = deque(item for item in self._waiting if not unwanted(item))
            for item in removed:
                self._release(item)
            return removed

    def _release(self, item: Item[T]) -> None:
        self.in_flight -= 1
        self._held[item.client] -= 1
        if not self._held[item.client]:
            del self._held[item.client]
