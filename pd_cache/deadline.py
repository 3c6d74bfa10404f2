"""Deadline: when an operation of several steps has to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """When an operation has to end: `timeout` seconds from now, or never, and in any case once it is `cut`."""

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if timeout is None else clock() + timeout

    @classmethod
    def of(cls, timeout: float | Deadline | None) -> Deadline:
        """Returns a deadline as it is; makes one from a number of seconds, or from None."""
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    def left(self) -> float | None:
        """Returns the seconds until the deadline, at least 0; None if there is no deadline."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        return self._end is not None and not self._clock() < self._end

    def cut(self) -> None:
        """Makes the deadline pass now. Any thread may call this. It does not interrupt a wait that has begun."""
        self._end = -math.inf
