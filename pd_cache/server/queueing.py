"""FairQueue: a bounded queue of work for threads. It is fair between clients by the work they ask for, not by their number of requests."""

from __future__ import annotations

import enum
import math
import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Lane(enum.Enum):
    """Says how long an item takes."""

    QUICK = 0
    """A question: a millisecond."""
    BULK = 1
    """Bytes to move, in turns of a second at most."""
    LEND = 2
    """Memory to map, and a backend to open for it: seconds."""


class Item(NamedTuple, Generic[T]):
    client: str
    lane: Lane
    cost: int
    """In any unit that all items of the lane share."""
    work: T
    until: float = math.inf
    """When it is too late to take the item; `expire` compares it with the time that it is given."""


class _ClientQueue(Generic[T]):
    def __init__(self) -> None:
        self.waiting: dict[Lane, deque[Item[T]]] = {lane: deque() for lane in Lane}
        self.served = dict.fromkeys(Lane, 0)
        """The cost of the work that was taken. An idle client saves nothing up: it starts from what the waiting clients have."""
        self.places = 0
        """Items waiting or running."""


class _Takers:
    """Threads that take from the same lanes and wait for items. They share the queue's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._something = threading.Condition(lock)
        self._waiting = 0
        """How many threads wait and have not been woken."""

    def wait(self) -> None:
        self._waiting += 1
        self._something.wait()

    def wake(self) -> bool:
        """Wakes one thread. Returns False if none waits."""
        if not self._waiting:
            return False
        self._waiting -= 1
        self._something.notify()
        return True


class FairQueue(Generic[T]):
    """Holds the items of many clients. Thread-safe.

    Within a client and lane, items keep their order. Between clients, the one that was served least comes first.

    An item wakes only one of the threads that take from its lane: waking threads that find nothing costs more than a lookup does. A thread
    looks at all of its lanes whenever it is woken or comes back for more, so an item that finds no thread waiting needs to wake none.

    At most `limit` items wait or run. A client may hold as many places as it leaves free, so a client alone gets half of them. If several
    clients have taken all places, a client that holds fewer takes one from the client that holds most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._clients: dict[str, _ClientQueue[T]] = {}
        self._lock = threading.Lock()
        self._takers: dict[tuple[Lane, ...], _Takers] = {}
        self._closed = False
        self._total = 0

    @property
    def in_flight(self) -> int:
        """How many items wait or run."""
        return self._total

    def put(self, item: Item[T]) -> Item[T] | None:
        """Queues an item. Returns the item that lost its place, if any: this item itself, or the last one of a client that holds more."""
        with self._lock:
            client = self._clients.get(item.client)
            if client is None:
                client = self._clients[item.client] = _ClientQueue()
            displaced: Item[T] | None = None
            if self._closed or client.places >= self._limit - self._total:
                displaced = None if self._closed else self._displace(client)
                if displaced is None:
                    self._tidy(item.client)
                    return item
            self._enter(client, item)
            client.places += 1
            self._total += 1
            self._wake(item.lane)
            return displaced

    def put_back(self, item: Item[T]) -> bool:
        """Queues the rest of an item that was taken, before its client's other items of the lane. Returns False if the queue is closed.

        If it returns True, the item keeps its place, and the caller must not pass it to `finished`.
        """
        with self._lock:
            if self._closed:
                return False
            self._enter(self._clients[item.client], item, first=True)
            self._wake(item.lane)
            return True

    def take(self, lanes: tuple[Lane, ...]) -> Item[T] | None:
        """Waits for the next item of the first lane that has one, and returns it. Returns None once the queue is closed.

        The caller must pass the item to `finished` in the end.
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
        """Returns up to `most` further items of a lane, without waiting. The caller must pass each to `finished` in the end."""
        items: list[Item[T]] = []
        with self._lock:
            while len(items) < most and not self._closed and (item := self._next(lane)) is not None:
                items.append(item)
        return items

    def finished(self, item: Item[T]) -> None:
        """Frees the place of an item that was taken."""
        with self._lock:
            self._release(item)

    def expire(self, now: float) -> list[Item[T]]:
        """Removes and returns the waiting items whose `until` has passed."""
        late: list[Item[T]] = []
        with self._lock:
            for client in list(self._clients.values()):
                for lane, waiting in client.waiting.items():
                    if any(item.until <= now for item in waiting):
                        late += [item for item in waiting if item.until <= now]
                        client.waiting[lane] = deque(item for item in waiting if item.until > now)
            for item in late:
                self._release(item)
        return late

    def discard(self, client: str) -> list[Item[T]]:
        """Removes and returns a client's waiting items."""
        with self._lock:
            known = self._clients.get(client)
            found = [] if known is None else [item for waiting in known.waiting.values() for item in waiting]
            if known is not None:
                known.waiting = {lane: deque() for lane in Lane}
            for item in found:
                self._release(item)
            return found

    def close(self) -> list[Item[T]]:
        """Makes every `take` return None from now on. Returns the items that still waited."""
        with self._lock:
            self._closed = True
            for takers in self._takers.values():
                while takers.wake():
                    pass
            return [item for client in self._clients.values() for lane in client.waiting.values() for item in lane]

    def _enter(self, client: _ClientQueue[T], item: Item[T], *, first: bool = False) -> None:
        lane = item.lane
        if not client.waiting[lane]:
            others = [c.served[lane] for c in self._clients.values() if c is not client and c.waiting[lane]]
            client.served[lane] = max(client.served[lane], min(others, default=0))
        if first:
            client.waiting[lane].appendleft(item)
        else:
            client.waiting[lane].append(item)

    def _displace(self, client: _ClientQueue[T]) -> Item[T] | None:
        """Removes and returns a waiting item of the client that holds most, if that is at least two more than this client holds."""
        rich = [one for one in self._clients.values() if one.places > client.places + 1 and any(one.waiting.values())]
        if not rich or self._total < self._limit:
            return None
        waiting = max(rich, key=lambda one: one.places).waiting
        item = max(waiting.values(), key=len).pop()
        self._release(item)
        return item

    def _wake(self, lane: Lane) -> None:
        """Wakes one thread that takes from the lane."""
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
        self._clients[item.client].places -= 1
        self._tidy(item.client)

    def _tidy(self, name: str) -> None:
        """Forgets a client that holds no place."""
        if not self._clients[name].places:
            del self._clients[name]
