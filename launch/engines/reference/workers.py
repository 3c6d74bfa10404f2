"""A few threads for calls that may take long: the cache's."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)


class Workers:
    """Runs at most `threads` calls at a time, and lets at most `backlog` wait. One more is refused, never waited for.

    The threads are daemons: a call that never returns blocks its thread, but neither `close` nor the end of the interpreter.
    """

    def __init__(self, name: str, *, threads: int, backlog: int = 0) -> None:
        self._limit = threads + backlog
        self._lock = threading.Lock()
        self._taken = 0
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def try_submit(self, call: Callable[[], None]) -> bool:
        """Runs `call` on a thread. Returns False if too many calls are running and waiting already, or after `close`."""
        with self._lock:
            if self._closed or self._taken >= self._limit:
                return False
            self._taken += 1
            self._calls.put(call)
        return True

    def close(self, timeout_s: float) -> bool:
        """Accepts no more calls and waits for those under way. Returns False if some had not ended after `timeout_s`. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # a worker that died would leave every later call waiting
                _logger.exception("a cache call's wrapper failed")
            finally:
                with self._lock:
                    self._taken -= 1
