"""Blocking calls on a bounded set of threads, waited for with a deadline.

A call into Mooncake cannot be cancelled. The caller therefore waits on its own clock, and what the call was given
(staging slots) is let go of by `on_end`, which runs exactly once, when nothing can touch it any more: after the call
returned, or at once if it never started.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from transfer.yielding import Yielding

_PATIENCE = 0.15
"""Seconds for which a waiter leaves a yielding thread to the leftovers of the processor."""

T = TypeVar("T")


def _nothing() -> None:
    return


class Call(Generic[T]):
    """One call under way. The lock is held until the outcome is there: the cheapest way for one thread to wait."""

    __slots__ = ("_done", "_error", "_function", "_on_end", "_thread", "_value", "deadline")

    def __init__(self, function: Callable[[], T], deadline: float, on_end: Callable[[], None]) -> None:
        self._function: Callable[[], T] | None = function
        self._on_end = on_end
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self._thread: Yielding | None = None
        self.deadline = deadline

    @property
    def started(self) -> bool:
        """Whether a thread has taken it up; it never will if the deadline passed first."""
        return self._thread is not None

    def outcome(self, otherwise: T) -> T:
        """What the call returned, or `otherwise` if it has not by the deadline. Raises what the call raised."""
        while not self._done.acquire(timeout=max(0.0, min(_PATIENCE, self.deadline - time.monotonic()))):
            if self._thread is not None:
                self._thread.hurry()
            if time.monotonic() >= self.deadline:
                return otherwise
        self._done.release()  # so that a second look finds it, too
        if self._error is not None:
            raise self._error
        return otherwise if self._value is None else self._value

    def _run(self, thread: Yielding) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            if time.monotonic() < self.deadline:
                self._thread = thread
                self._value = thread.run(function)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error
        finally:
            # the slots first: who wakes up may lease again at once
            self._on_end()
            self._done.release()

    def _drop(self) -> None:
        self._function = None
        self._on_end()
        self._done.release()


class CallThreads:
    """`count` daemon threads that run calls in the order of submission; at most `limit` are queued or running."""

    def __init__(self, name: str, count: int, *, yields: bool = False, limit: int = 256) -> None:
        """`yields` is for calls that spin: see `transfer.yielding`."""
        self._queue: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        self._limit = limit
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}
        self._pending = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(yields,), name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, function: Callable[[], T], deadline: float, on_end: Callable[[], None] = _nothing
    ) -> Call[T] | None:
        """Queue a call. None, with `on_end` already run, if it could not start in time: every thread is held by a
        call that has outlived its deadline, or `limit` calls are ahead."""
        call = Call(function, deadline, on_end)
        with self._lock:
            now = time.monotonic()
            stuck = len(self._running) == len(self._threads) and all(end < now for end in self._running.values())
            accepted = not self._closed and not stuck and self._pending < self._limit
            if accepted:
                self._pending += 1
                self._queue.put(call)  # type: ignore[arg-type]  # the queue does not care what the call returns
        if not accepted:
            call._drop()
            return None
        return call

    def close(self, timeout: float) -> bool:
        """Refuse new calls and wait for those accepted. False if some still run after `timeout` seconds."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                for _ in self._threads:
                    self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, yields: bool) -> None:
        priority = Yielding(yields)
        me = threading.get_ident()
        while (call := self._queue.get()) is not None:
            with self._lock:
                self._running[me] = call.deadline
            try:
                call._run(priority)
            finally:
                with self._lock:
                    del self._running[me]
                    self._pending -= 1
