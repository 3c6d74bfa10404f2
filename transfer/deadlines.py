"""The one form of time below the public edge: `end`, on the monotonic clock; None if nothing ends."""

from __future__ import annotations

import time
from typing import overload

Timeout = float | None
"""How many seconds a call may take; None for the configured ones, or for any number."""


@overload
def left(end: float) -> float: ...
@overload
def left(end: None) -> None: ...
def left(end: float | None) -> float | None:
    """Returns the seconds until `end`, at least 0."""
    return None if end is None else max(0.0, end - time.monotonic())


def end_in(seconds: float | None) -> float | None:
    """Returns when `seconds` from now are over."""
    return None if seconds is None else time.monotonic() + seconds
