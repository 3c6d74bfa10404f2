"""Tasks that a peer submits and asks about later: run on a bounded set of threads, announced by an event descriptor. Every task ends."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from pd_cache.objects.cache import Deadline
from pd_cache.sparse_log import SparseLog
from transfer.calls import CallThreads

T = TypeVar("T")

MOST_QUEUED = 1024
"""One more task of a kind ends at once, as one that failed."""
MOST_KEPT = 1 << 16
"""The most results that are kept for a peer that does not ask for them; the oldest go first."""


class TaskLane(Generic[T]):
    """Tasks of one kind. Thread-safe."""

    def __init__(self, name: str, threads: int, complain: Callable[[str], None]) -> None:
        """`complain` is called with a line about tasks that raised, at most once in ten seconds for each type of error."""
        self._threads = CallThreads(name, threads, limit=MOST_QUEUED, spare=threads)
        self._name = name
        self._complain = complain
        self._log = SparseLog()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._results: OrderedDict[int, T] = OrderedDict()
        self._under_way: dict[int, Deadline] = {}
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._closed = False

    @property
    def event(self) -> int:
        """The descriptor that becomes readable when tasks have ended."""
        return self._event

    def submit(self, task: Callable[[Deadline], T], failed: T, timeout: float) -> int:
        """Begins a task, which is given its deadline. Returns its number. `failed` is the result if it raises or cannot run."""
        deadline, end = Deadline(timeout), time.monotonic() + timeout
        with self._lock:
            number = next(self._numbers)
            self._under_way[number] = deadline
            if self._closing:
                deadline.cut()
        result = failed

        def run() -> None:
            nonlocal result
            try:
                result = task(deadline)
            except Exception as error:  # noqa: BLE001 - a peer waits for the result, whatever it is
                if (count := self._log.admit(type(error).__name__, 1)) is not None:
                    self._complain(f"{self._name}: {count} tasks failed: {error!r}")

        self._threads.submit(run, end, lambda: self._ended(number, result))
        return number

    def take(self, number: int) -> T | None:
        """Returns a task's result, once; None while it runs, and for unknown numbers."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Returns the results that were not taken yet."""
        with self._lock:
            taken, self._results = dict(self._results), OrderedDict()
            return taken

    def close(self, timeout: float) -> None:
        """Refuses further tasks, makes the deadlines of those under way pass, waits at most `timeout` seconds for them, and closes the
        descriptor. Idempotent."""
        with self._lock:
            self._closing = True
            for deadline in self._under_way.values():
                deadline.cut()
        self._threads.close(timeout)
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)

    def _ended(self, number: int, result: T) -> None:
        with self._lock:
            del self._under_way[number]
            self._results[number] = result
            if len(self._results) > MOST_KEPT:
                self._results.popitem(last=False)
            if not self._closed:
                try:
                    os.eventfd_write(self._event, 1)
                except BlockingIOError:  # it is readable, and has been for 2^64 tasks
                    return
