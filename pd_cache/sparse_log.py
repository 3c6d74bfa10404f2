"""SparseLog: how often a line that repeats itself may be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable


class SparseLog:
    """Lets one event in `every_s` seconds through for each key, and counts those between. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[Hashable, tuple[float, int]] = {}
        """For each key, when an event was let through, and how much has been held back since."""

    def admit(self, key: Hashable = None, count: int = 1) -> int | None:
        """Returns None if an event is to be held back; else how much it and those held back before it count together.

        The number of keys must be bounded by the caller.
        """
        with self._lock:
            now = self._clock()
            last, silent = self._last.get(key, (-self._every_s, 0))
            if now - last < self._every_s:
                self._last[key] = (last, silent + count)
                return None
            self._last[key] = (now, 0)
            return silent + count
