"""Reads of parts of objects: one part of many objects, then the next part.

Mooncake has read sessions for that. A session looks an object up once and leases it; then each range of it is read without asking the
master. What was measured (docs/mooncake.md):

1. A client has one session of a key. If two readers of a process use it and one ends it, the other's reads fail (-600). So readers are
   counted here, and the last one ends the session.
2. The lease is that of the begin, and a second begin renews it. `RangeRead` renews it every second.
3. If the object is removed or evicted meanwhile, a read returns what is in its place now, and no code says so. Readers must check what
   they read, end to end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_RENEW_S = 1.0
"""How often a lease is renewed. Any lease that suits a cache lasts for several seconds."""


class ObjectRange(NamedTuple):
    """A part of an object, and where it goes. All numbers are bytes."""

    start: int
    """The first byte, in the object."""
    size: int
    place: int
    """Where the first byte goes, in the slot."""


class RangeClient(Protocol):
    """The methods of a Mooncake client that are used here. They return negative ints as codes, and raise nothing."""

    def batch_get_session_start(self, keys: list[str]) -> list[int]: ...
    def batch_get_session_end(self, keys: list[str]) -> int: ...


class OpenReads:
    """The read sessions of one client, and how many readers need each. Thread-safe. Its calls block, except `end_later`."""

    def __init__(self, client: RangeClient) -> None:
        self._client = client
        self._readers: Counter[str] = Counter()
        self._ended: deque[str] = deque()
        """Keys that one reader less needs, of readers that could not block."""
        self._lock = threading.Lock()

    def begin(self, keys: Sequence[str]) -> list[int]:
        """Counts one more reader of each key, and renews its lease. Returns a code for each; 0 means that it can be read.

        Each reader ends all of its keys, whatever their codes are.
        """
        with self._lock:
            self._readers.update(keys)
            self._end_what_is_over()
            return self._client.batch_get_session_start(list(keys))

    def renew(self, keys: Sequence[str]) -> None:
        """Renews the leases of keys that have readers."""
        with self._lock:
            if wanted := [key for key in keys if self._readers[key] > 0]:
                self._client.batch_get_session_start(wanted)

    def retain(self, keys: Sequence[str]) -> None:
        """Counts one more reader of keys that have readers."""
        with self._lock:
            self._readers.update(keys)

    def end(self, keys: Sequence[str]) -> None:
        """Counts one reader less of each key."""
        self.end_later(keys)
        with self._lock:
            self._end_what_is_over()

    def end_later(self, keys: Sequence[str]) -> None:
        """Does what `end` does, but leaves it to the next call of `begin` or `end`."""
        self._ended.extend(keys)

    @property
    def keys(self) -> set[str]:
        """The keys that have readers."""
        with self._lock:
            self._end_what_is_over()
            return set(self._readers)

    def _end_what_is_over(self) -> None:
        """Ends the sessions that no reader needs any more. Call with the lock held."""
        over: list[str] = []
        while self._ended:
            key = self._ended.popleft()
            self._readers[key] -= 1
            if self._readers[key] <= 0:
                del self._readers[key]
                over.append(key)
        if over:
            self._client.batch_get_session_end(over)


class RangeRead:
    """One reader of several keys. It is begun on a thread of the store, and may be closed on any other thread before that has ended."""

    def __init__(self, reads: OpenReads, keys: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._reads = reads
        self._keys = tuple(keys)
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = False
        self._closed = False
        self._renew_at = 0.0

    def begin(self) -> list[int]:
        """Begins to read the keys. Returns a code for each. Blocks."""
        codes = self._reads.begin(self._keys)
        with self._lock:
            self._begun = True
            self._renew_at = self._clock() + _RENEW_S
            late = self._closed
        if late:
            self._reads.end(self._keys)
        return codes

    def renew_if_due(self) -> None:
        """Renews the leases if that was last done more than `_RENEW_S` ago. Blocks."""
        with self._lock:
            due = self._begun and not self._closed and self._clock() >= self._renew_at
            if due:
                self._renew_at = self._clock() + _RENEW_S
        if due:
            self._reads.renew(self._keys)

    def close(self) -> None:
        """Ends the reading, now or as soon as it has begun. Does not block. Idempotent."""
        with self._lock:
            ends = self._begun and not self._closed
            self._closed = True
        if ends:
            self._reads.end_later(self._keys)
