"""NodeBreaker: decides when to leave a node alone. Pure: the time comes from the caller."""

from __future__ import annotations

from enum import Enum

_FIRST_SKIP_S, _LAST_SKIP_S = 1.0, 10.0


class Blame(Enum):
    """How bad a failed request looks for its node."""

    UNREACHABLE = "unreachable"
    """No connection could be made. The node is skipped immediately."""
    FAILED = "failed"
    """The node failed this request, which may be the request's fault. The node is skipped after several failures in a row."""


class NodeBreaker:
    """Skips a node for 1, 2, 4 … 10 s, then lets through one request a second until one is answered."""

    def __init__(self, failures: int) -> None:
        """`failures`: how many in a row open the breaker."""
        self._limit = failures
        self._failures = 0
        self._opened = 0
        self._skip_until = 0.0
        self._on_trial = False
        self.unreachable = False
        """Whether the breaker is open because no connection could be made."""

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent at `now`."""
        return now >= self._skip_until

    def wait(self, now: float) -> float:
        """Returns the seconds until the breaker allows a request."""
        return max(0.0, self._skip_until - now)

    def sent(self, now: float) -> None:
        """Notes that a request is sent. If the breaker is open, the node is on trial, and the next request may follow a second later."""
        if self._opened:
            self._on_trial = True
            self._skip_until = now + _FIRST_SKIP_S

    def succeeded(self) -> None:
        """Notes that the node answered as it should."""
        self._failures = self._opened = 0
        self._skip_until = 0.0
        self._on_trial = self.unreachable = False

    def failed(self, fault: Blame, now: float) -> None:
        """Notes a failure."""
        self._failures += 1
        if fault is not Blame.UNREACHABLE and self._failures < self._limit:
            return
        if now < self._skip_until and not self._on_trial:
            return  # requests that fail together count once
        self._on_trial = False
        self.unreachable = fault is Blame.UNREACHABLE
        self._opened += 1
        self._skip_until = now + min(_LAST_SKIP_S, _FIRST_SKIP_S * 2.0 ** min(self._opened - 1, 8))
