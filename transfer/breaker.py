"""The circuit breaker of a pool: a pure state machine without a clock."""

from __future__ import annotations

import threading


class CircuitBreaker:
    """Counts failures in a row. After `failures` of them the pool is down until a probe or a call succeeds.

    Thread-safe. Callers on a hot path read only `down`.
    """

    def __init__(self, failures: int) -> None:
        self._limit = failures
        self._in_a_row = 0
        self._lock = threading.Lock()
        self.down = False

    def succeeded(self) -> bool:
        """Notes a call that the pool answered. Returns True if this closed the breaker."""
        if self._in_a_row == 0 and not self.down:
            return False
        with self._lock:
            closed_now = self.down
            self._in_a_row = 0
            self.down = False
            return closed_now

    def failed(self) -> bool:
        """Notes a call that the pool failed. Returns True if this opened the breaker."""
        with self._lock:
            self._in_a_row += 1
            if self.down or self._in_a_row < self._limit:
                return False
            self.down = True
            return True
