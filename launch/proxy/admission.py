"""Limits how many requests may be under way at a time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from launch.proxy.answers import ApiError, overloaded


class Admission:
    """Admits requests, or refuses them immediately."""

    def __init__(self, max_requests: int, max_per_key: int | None) -> None:
        self._max_requests = max_requests
        self._max_per_key = max_per_key
        self._running: Counter[str] = Counter()
        self.closing = False
        """Set once no more are admitted."""

    def running(self) -> int:
        """Returns how many requests are admitted now."""
        return self._running.total()

    def check(self, client: str) -> None:
        """Raises ApiError 503 if the proxy is full or closing, 429 if the client has its share. Takes no place."""
        if self.closing:
            raise overloaded("The proxy is shutting down")
        if self.running() >= self._max_requests:
            raise overloaded(f"{self._max_requests} requests are in flight, and this proxy takes no more at a time")
        if client and self._max_per_key is not None and self._running[client] >= self._max_per_key:
            raise ApiError(
                429,
                f"{self._max_per_key} requests of this key are in flight, and a key may have no more at a time",
                code="rate_limit_exceeded",
                retry_after=1,
            )

    @contextmanager
    def admitted(self, client: str) -> Iterator[None]:
        """Holds a place while the block runs. Raises ApiError as `check` does."""
        self.check(client)
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
