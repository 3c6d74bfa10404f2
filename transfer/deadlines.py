"""Time below the public edge has one form: `end`, on the monotonic clock; None if nothing ends."""

from __future__ import annotations

import time

Timeout = float | None
"""How many seconds a call may take; None for the configured ones, or for any number."""
End = float | None
"""When a call has to end, on the monotonic clock; None if only its steps have time-outs, which are
configured."""


def left(end: float) -> float:
    """Returns the seconds until `end`, at least 0."""
    return max(0.0, end - time.monotonic())


def end_or(end: End, ms: int) -> float:
    """Returns `end`, or if that is None, the time in `ms` milliseconds."""
    return time.monotonic() + ms / 1000 if end is None else end


def end_in(seconds: float | None) -> float | None:
    """Returns the time in `seconds` from now; None for None."""
    return None if seconds is None else time.monotonic() + seconds
