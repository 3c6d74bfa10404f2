"""A condition that an interrupt cannot leave locked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Condition(threading.Condition):
    """A `threading.Condition` on which a user's thread may wait.

    Its `with` block uses the lock's own methods, in C, which Python never interrupts half-way. Those of `threading.Condition` are
    written in Python: a KeyboardInterrupt inside one leaves the lock taken, and every other thread waits for it for ever.
    """

    def __init__(self) -> None:
        self._own = threading.RLock()
        super().__init__(self._own)

    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._own.__enter__

    @property
    def __exit__(self) -> Callable[..., Any]:
        return self._own.__exit__
