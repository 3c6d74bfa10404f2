"""Limits how many requests may be sent a second time. Pure: the time comes from the caller."""

from __future__ import annotations


class RetryBudget:
    """A token bucket over all requests: each request that arrives adds a fraction of a retry, and each second adds a few more.

    If every request fails, nodes get only that fraction more requests, not twice as many. A full bucket lasts for as many requests as a
    node can have when it dies.
    """

    def __init__(self, burst: int, *, fraction: float = 0.2, per_second: float = 10.0) -> None:
        """`burst`: the most retries that the bucket holds. It starts full."""
        self._burst = float(burst)
        self._fraction = fraction
        self._per_second = per_second
        self._left = self._burst
        self._filled_at: float | None = None

    def asked(self, now: float) -> None:
        """Notes that a request arrived."""
        self._fill(now, self._fraction)

    def allows(self, now: float) -> bool:
        """Returns whether a request may be retried at `now`."""
        self._fill(now)
        return self._left >= 1.0

    def take(self, now: float) -> None:
        """Notes a retry that `allows` has permitted."""
        self._fill(now, -1.0)

    def _fill(self, now: float, more: float = 0.0) -> None:
        passed = 0.0 if self._filled_at is None else max(0.0, now - self._filled_at)
        self._filled_at = now
        self._left = min(self._burst, self._left + passed * self._per_second + more)
