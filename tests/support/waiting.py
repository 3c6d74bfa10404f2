"""Waiting for conditions, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""The least that a condition is waited for. No test measures with it: a machine that is busy with other things may be slow."""


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE_S, what: str = "the condition") -> None:
    """Returns as soon as `condition()` is true; AssertionError if it is not for `seconds`, or a minute if that is longer."""
    seconds = max(seconds, PATIENCE_S)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {seconds} s"
        time.sleep(0.01)
