"""Runs tasks on a bounded set of threads. A peer submits them, and asks about them later. Every task ends.

`TaskLane` runs tasks of one kind, and announces their ends by an event descriptor. `RowJobs` stores and loads
rows of one memory on two lanes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from pd_cache.adapters.versioned_names import VersionedNames
from pd_cache.objects.object_cache import Deadline
from pd_cache.sparse_log import SparseLog
from transfer.calls import CallThreads
from transfer.deadlines import left

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_QUEUED = 1024
"""The most queued tasks of a kind. A further task fails at once."""
MOST_KEPT = 1 << 16
"""The most results that wait for their peer. The oldest results are dropped first."""
_WARN_S = 10.0
"""`RowJobs.drain` logs at this interval while it waits. `RowJobs.close` waits this much longer than the time
of a job."""


class TaskLane(Generic[T]):
    """The tasks of a kind. Thread-safe."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = CallThreads(name, threads, limit=MOST_QUEUED, spare=threads)
        self._name = name
        self._log = SparseLog()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._results: OrderedDict[int, T] = OrderedDict()
        self._under_way: dict[int, Deadline] = {}
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """The descriptor that becomes readable when tasks have ended."""
        self._closing = False
        self._closed = False

    def submit(self, task: Callable[[Deadline], T], failed: T, timeout: float) -> int:
        """Begins a task, which gets its deadline. Returns its number. `failed` is the result if it raises or
        cannot run."""
        deadline, end = Deadline(timeout), time.monotonic() + timeout
        with self._changed:
            number = next(self._numbers)
            self._under_way[number] = deadline
            if self._closing:
                deadline.cut()
        result = failed

        def run() -> None:
            nonlocal result
            try:
                result = task(deadline)
            except Exception as error:  # noqa: BLE001 - a peer waits for a result in any case
                if (count := self._log.admit(type(error).__name__, 1)) is not None:
                    log.warning("%s: %d tasks failed: %r", self._name, count, error)

        self._threads.submit(run, end, lambda: self._ended(number, result))
        return number

    def take(self, number: int) -> T | None:
        """Returns a task's result, once; None while it runs, and for unknown numbers."""
        with self._changed:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Returns the results that were not taken yet."""
        with self._changed:
            taken, self._results = dict(self._results), OrderedDict()
            return taken

    def drain(self, timeout: float) -> bool:
        """Makes the deadlines of the tasks under way pass, and waits at most `timeout` seconds for them.
        Returns whether all have ended."""
        with self._changed:
            self._cut()
            return self._changed.wait_for(lambda: not self._under_way, timeout)

    def close(self, timeout: float) -> bool:
        """Refuses further tasks, makes the deadlines of those under way pass, waits at most `timeout` seconds
        for them, and closes the descriptor. Returns whether all have ended. Idempotent."""
        with self._changed:
            self._closing = True
            self._cut()
        ended = self._threads.close(timeout)
        with self._changed:
            if not self._closed:
                self._closed = True
                os.close(self.event)
        return ended

    def _cut(self) -> None:
        for deadline in self._under_way.values():
            deadline.cut()

    def _ended(self, number: int, result: T) -> None:
        with self._changed:
            del self._under_way[number]
            self._changed.notify_all()
            self._results[number] = result
            if len(self._results) > MOST_KEPT:
                self._results.popitem(last=False)
            if not self._closed:
                try:
                    os.eventfd_write(self.event, 1)
                except BlockingIOError:  # it is readable already
                    return


class RowResult(NamedTuple):
    """The result of a job."""

    job: int
    is_load: bool
    names: tuple[bytes, ...]
    done: tuple[bool, ...]
    """For each name, whether its value was stored or loaded."""
    seconds: float = 0.0
    """How long the job took, from its submission."""


class RowJobs:
    """Moves rows between a memory and the cache, for a caller that submits jobs and asks which have ended.
    For use by one thread.

    A job's time counts from its submission. After its end, nothing reads or writes its rows. Stores with more
    than `most_stored` rows together fail at once. Loads are bounded by the caller's rows.
    """

    def __init__(
        self,
        names: VersionedNames,
        memory: memoryview,
        row_bytes: int,
        *,
        seconds: float,
        most_stored: int,
        threads: int = 2,
    ) -> None:
        """`memory` is flat and writable, and has rows of `row_bytes`. A job may take `seconds`. Each
        direction has `threads` threads."""
        self._names = names
        self._memory = memory
        self._row_bytes = row_bytes
        self._seconds = seconds
        self._most_stored = most_stored
        self._loads: TaskLane[RowResult] = TaskLane("pd-cache-loads", threads)
        self._stores: TaskLane[RowResult] = TaskLane("pd-cache-stores", threads)
        self._storing: dict[int, int] = {}
        """How many rows each store has that has not ended."""
        self._refused: list[RowResult] = []

    def load(self, number: int, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Begins to load the values of these names into these rows. Returns at once; so does `store`."""
        self._submit(self._loads, RowResult(number, True, tuple(names), (False,) * len(names)), rows, None)

    def store(
        self, number: int, names: Sequence[bytes], rows: Sequence[int], *, label: str | None = None
    ) -> None:
        """Begins to store rows that were computed with the weights of `label`, by default the engine's."""
        job = RowResult(number, False, tuple(names), (False,) * len(names))
        others = sum(self._storing.values())
        if others and others + len(rows) > self._most_stored:
            self._refused.append(job)
            return
        self._storing[number] = len(rows)
        self._submit(self._stores, job, rows, self._names.label if label is None else label)

    def finished(self) -> list[RowResult]:
        """Returns the jobs that have ended since the last call."""
        stored, refused = self._stores.take_all().values(), self._refused
        self._refused = []
        for job in stored:
            self._storing.pop(job.job, None)
        return [*self._loads.take_all().values(), *stored, *refused]

    def drain(self) -> None:
        """Ends all jobs: waiting jobs fail, and running jobs are cut short. Waits for the running jobs."""
        for lane in (self._loads, self._stores):
            while not lane.drain(_WARN_S):
                log.warning("still waiting for transfers")

    def close(self) -> bool:
        """Ends all jobs and the threads, and releases the memory. Returns False if a transfer still uses it,
        long after its deadline. Idempotent."""
        end = time.monotonic() + self._seconds + _WARN_S
        ended = [lane.close(left(end)) for lane in (self._loads, self._stores)]
        if not all(ended):
            return False
        self._memory.release()
        return True

    def _submit(
        self, lane: TaskLane[RowResult], job: RowResult, rows: Sequence[int], label: str | None
    ) -> None:
        """Begins a job. Its result is `job` if the job fails."""
        begun, size = time.monotonic(), self._row_bytes

        def run(deadline: Deadline) -> RowResult:
            if deadline.passed:
                return job
            views = [self._memory[row * size : (row + 1) * size] for row in rows]
            try:
                if job.is_load:
                    reasons = self._names.read_into(job.names, views, timeout=deadline)
                    done = [not reason for reason in reasons]
                else:
                    done = self._names.put(job.names, views, label=label, timeout=deadline)
                return job._replace(done=tuple(done), seconds=time.monotonic() - begun)
            finally:
                for view in views:  # the memory's owner unmaps it when nothing refers to it
                    with contextlib.suppress(BufferError):
                        view.release()

        lane.submit(run, job, self._seconds)
