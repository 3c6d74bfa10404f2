"""SparseLog bounds how often a repeated line is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable


class SparseLog:
    """For each key, lets one event in `every_s` seconds through, and counts the events that it holds back.
    Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[Hashable, tuple[float, int]] = {}
        """For each key: when the last event was let through, and the count held back since then."""

    def admit(self, key: Hashable = None, count: int = 1) -> int | None:
        """Returns None if the event is held back. Otherwise returns the count of this event and of those held
        back before it.

        The caller bounds the number of keys.
        """
        with self._lock:
            now = self._clock()
            last, silent = self._last.get(key, (-self._every_s, 0))
            if now - last < self._every_s:
                self._last[key] = (last, silent + count)
                return None
            self._last[key] = (now, 0)
            return silent + count
