"""Deadlines. Below the public API, a deadline is always an `end`: a time on the monotonic clock, or None for
no deadline."""

from __future__ import annotations

import time

Timeout = float | None
"""How many seconds a call may take; None for the configured time-outs, or for no limit."""
End = float | None
"""When a call has to end, on the monotonic clock; None if only its steps have (configured) time-outs."""


def left(end: float) -> float:
    """Returns the seconds until `end`, at least 0."""
    return max(0.0, end - time.monotonic())


def end_or(end: End, ms: int) -> float:
    """Returns `end`; if that is None, the time `ms` milliseconds from now."""
    return time.monotonic() + ms / 1000 if end is None else end


def end_in(seconds: float | None) -> float | None:
    """Returns the time `seconds` from now; None for None."""
    return None if seconds is None else time.monotonic() + seconds


def sooner(end: End, ms: int) -> float:
    """Returns the earlier of `end` and the time `ms` milliseconds from now."""
    usual = time.monotonic() + ms / 1000
    return usual if end is None else min(usual, end)
