"""RowJobs: stores and loads of rows of one memory, on threads of its own, for a caller that only submits them and asks what has ended.

Each job has one deadline from when it was submitted, also while it waits for a thread. When a job has ended, nothing reads or writes its rows
any more. Jobs that wait are bounded: stores by `most_waiting` rows, beyond which they fail at once; loads by the rows that the caller has.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pd_cache.adapters.versioned_names import VersionedNames

log = logging.getLogger(__name__)

_WARN_S = 10.0
"""How often a thread that waits for jobs says so."""


class RowResult(NamedTuple):
    """A job that has ended."""

    job: int
    is_load: bool
    names: tuple[bytes, ...]
    done: tuple[bool, ...]
    """For each name whether it was stored or loaded."""
    seconds: float
    """How long it took, from its submission."""


class _RowJob(NamedTuple):
    number: int
    is_load: bool
    names: tuple[bytes, ...]
    rows: tuple[int, ...]
    begun: float
    end: float
    epoch: str | None


class RowJobs:
    """Moves rows between a memory and the cache. Thread-safe."""

    def __init__(
        self,
        names: VersionedNames,
        memory: memoryview,
        row_bytes: int,
        *,
        seconds: float,
        most_waiting: int,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` is flat and writable, and has rows of `row_bytes`. Each job has `seconds`. There are `threads` for each direction."""
        self._names = names
        self._memory: memoryview | None = memory
        self._row_bytes = row_bytes
        self._rows = len(memory) // row_bytes if row_bytes else 0
        self._seconds = seconds
        self._most_waiting = most_waiting
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[bool, deque[_RowJob]] = {True: deque(), False: deque()}
        self._running = 0
        self._finished: deque[RowResult] = deque()
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(is_load,), name=f"pd-cache-{'loads' if is_load else 'stores'}", daemon=True
            )
            for is_load in (True, False)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, number: int, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begins to load the values of these names into these rows. Returns at once; so does `store`."""
        self._submit(number, names, rows, is_load=True, epoch=None)

    def store(self, number: int, names: Sequence[bytes], rows: Sequence[int], *, epoch: str | None = None) -> None:
        """Begins to store rows that were computed in the weights version `epoch`, by default the engine's."""
        self._submit(number, names, rows, is_load=False, epoch=self._names.own if epoch is None else epoch)

    def finished(self) -> list[RowResult]:
        """Returns the jobs that have ended since the last call."""
        with self._changed:
            ended = list(self._finished)
            self._finished.clear()
            return ended

    @property
    def busy(self) -> bool:
        """Whether there are jobs that have not ended, or whose end was not asked for."""
        with self._changed:
            return bool(self._running or self._finished or self._waiting[True] or self._waiting[False])

    def drain(self) -> None:
        """Ends all jobs: those that wait fail, and those that run are waited for, until their deadlines at the latest."""
        with self._changed:
            self._cancel()
            while not self._changed.wait_for(lambda: not self._running, _WARN_S):
                log.warning("still waiting for %d transfers", self._running)

    def close(self) -> bool:
        """Ends all jobs and the threads, and lets go of the memory. Returns False if a transfer still uses it, long after its deadline.
        Idempotent."""
        with self._changed:
            self._closing = True
            self._cancel()
            self._changed.notify_all()
        end = self._clock() + self._seconds + _WARN_S
        for thread in self._threads:
            thread.join(max(0.0, end - self._clock()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()
        return True

    # --- inside --------------------------------------------------------------------------------------------------

    def _submit(
        self, number: int, names: Sequence[bytes], rows: Sequence[int], *, is_load: bool, epoch: str | None
    ) -> None:
        now = self._clock()
        job = _RowJob(number, is_load, tuple(names), tuple(rows), now, now + self._seconds, epoch)
        with self._changed:
            waiting = sum(len(one.rows) for one in self._waiting[False])
            if (
                self._closing
                or len(job.names) != len(job.rows)
                or any(not 0 <= row < self._rows for row in job.rows)
                or (not is_load and waiting and waiting + len(job.rows) > self._most_waiting)
            ):
                self._finish(job, [False] * len(job.names))
                return
            self._waiting[is_load].append(job)
            self._changed.notify_all()

    def _cancel(self) -> None:
        """Ends the jobs that wait. The lock must be held."""
        for waiting in self._waiting.values():
            while waiting:
                job = waiting.popleft()
                self._finish(job, [False] * len(job.names))

    def _finish(self, job: _RowJob, done: Sequence[bool]) -> None:
        """Notes that a job has ended. The lock must be held."""
        self._finished.append(RowResult(job.number, job.is_load, job.names, tuple(done), self._clock() - job.begun))

    def _work(self, is_load: bool) -> None:
        waiting = self._waiting[is_load]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(waiting) or self._closing)
                if not waiting:
                    return
                job = waiting.popleft()
                self._running += 1
            done = [False] * len(job.names)
            try:
                done = self._move(job)
            except Exception:
                log.exception("job %d failed", job.number)
            finally:
                with self._changed:
                    self._running -= 1
                    self._finish(job, done)
                    self._changed.notify_all()

    def _move(self, job: _RowJob) -> list[bool]:
        left = job.end - self._clock()
        if left <= 0 or self._memory is None or not job.names:
            return [False] * len(job.names)
        views = [self._memory[row * self._row_bytes : (row + 1) * self._row_bytes] for row in job.rows]
        try:
            if job.is_load:
                return [not reason for reason in self._names.read_into(job.names, views, timeout=left)]
            return self._names.put(job.names, views, epoch=job.epoch, timeout=left)
        finally:
            for view in views:  # the memory's owner unmaps it when nothing refers to it
                with contextlib.suppress(BufferError):
                    view.release()
