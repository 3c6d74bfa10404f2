"""Whose turn is it? Bounded, and fair between clients by the work that they ask for, not by the number of requests."""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Lane(enum.Enum):
    """How long an item takes."""

    QUICK = 0
    """A question: a millisecond."""
    BULK = 1
    """Bytes to move."""


class Item(NamedTuple, Generic[T]):
    client: str
    lane: Lane
    cost: int
    """In any unit that all items of the lane share."""
    work: T


class _Client(Generic[T]):
    def __init__(self) -> None:
        self.waiting: dict[Lane, deque[Item[T]]] = {Lane.QUICK: deque(), Lane.BULK: deque()}
        self.served = {Lane.QUICK: 0, Lane.BULK: 0}
        """The cost of what it was given, and never less than that of those who wait: nobody saves up by being idle."""
        self.held = 0
        """Items waiting or running."""


class _Takers:
    """Threads that take from the same lanes, and wait for something to be there. The lock is the queue's."""

    def __init__(self, lock: threading.Lock) -> None:
        self._something = threading.Condition(lock)
        self._waiting = 0
        """Threads that wait and have not been woken."""

    def wait(self) -> None:
        self._waiting += 1
        self._something.wait()

    def wake(self) -> bool:
        """Have one thread look; False if none waits."""
        if not self._waiting:
            return False
        self._waiting -= 1
        self._something.notify()
        return True


class FairQueue(Generic[T]):
    """Items of many clients: in order within a client and lane, the client that was given least first. Thread-safe.

    An item wakes one thread that takes from its lane, not all: waking those that find nothing costs more than a lookup does.
    A thread that is woken, or that comes back for more, looks at all of its lanes, so none is needed for an item that finds
    nobody waiting.

    At most `limit` wait or run. A client may hold as much as it leaves free, so that one alone gets half of the places and
    none can keep the others out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._clients: dict[str, _Client[T]] = {}
        self._lock = threading.Lock()
        self._takers: dict[tuple[Lane, ...], _Takers] = {}
        self._closed = False
        self._total = 0

    @property
    def in_flight(self) -> int:
        """Items that wait or run."""
        return self._total

    def put(self, item: Item[T]) -> bool:
        """Queue an item; False if there is no place for it."""
        with self._lock:
            client = self._clients.get(item.client)
            if client is None:
                client = self._clients[item.client] = _Client()
            if self._closed or client.held >= self._limit - self._total:
                self._tidy(item.client)
                return False
            lane = item.lane
            if not client.waiting[lane]:
                others = [c.served[lane] for c in self._clients.values() if c is not client and c.waiting[lane]]
                client.served[lane] = max(client.served[lane], min(others, default=0))
            client.waiting[lane].append(item)
            client.held += 1
            self._total += 1
            self._wake(lane)
            return True

    def take(self, lanes: tuple[Lane, ...]) -> Item[T] | None:
        """The next item, of the first of the lanes that has one; waits for it. None once the queue is closed.

        The caller gives it to `finished` in the end.
        """
        with self._lock:
            takers = self._takers.get(lanes)
            if takers is None:
                takers = self._takers[lanes] = _Takers(self._lock)
            while True:
                if self._closed:
                    return None
                for lane in lanes:
                    item = self._next(lane)
                    if item is not None:
                        return item
                takers.wait()

    def take_more(self, lane: Lane, most: int) -> list[Item[T]]:
        """Up to `most` further items of a lane, without waiting: what can be done together with one that was taken."""
        items: list[Item[T]] = []
        with self._lock:
            while len(items) < most and not self._closed and (item := self._next(lane)) is not None:
                items.append(item)
        return items

    def finished(self, item: Item[T]) -> None:
        """An item that was taken takes its place no longer."""
        with self._lock:
            self._release(item)

    def discard(self, client: str) -> list[Item[T]]:
        """Take out what a client has waiting."""
        with self._lock:
            known = self._clients.get(client)
            found = [] if known is None else [item for waiting in known.waiting.values() for item in waiting]
            if known is not None:
                known.waiting = {lane: deque() for lane in Lane}
            for item in found:
                self._release(item)
            return found

    def close(self) -> list[Item[T]]:
        """Have every `take` return None, from now on; what still waited."""
        with self._lock:
            self._closed = True
            for takers in self._takers.values():
                while takers.wake():
                    pass
            return [item for client in self._clients.values() for lane in client.waiting.values() for item in lane]

    def _wake(self, lane: Lane) -> None:
        """Have one thread take from the lane."""
        any(takers.wake() for lanes, takers in self._takers.items() if lane in lanes)

    def _next(self, lane: Lane) -> Item[T] | None:
        waiting = [client for client in self._clients.values() if client.waiting[lane]]
        if not waiting:
            return None
        client = min(waiting, key=lambda one: one.served[lane])
        item = client.waiting[lane].popleft()
        client.served[lane] += item.cost
        return item

    def _release(self, item: Item[T]) -> None:
        self._total -= 1
        self._clients[item.client].held -= 1
        self._tidy(item.client)

    def _tidy(self, name: str) -> None:
        """Forget a client that holds nothing, with what it was served: the others have moved on by then."""
        if not self._clients[name].held:
            del self._clients[name]
