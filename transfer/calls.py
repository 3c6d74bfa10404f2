"""Runs blocking calls on a bounded set of threads. Callers wait for them with a deadline.

A call into Mooncake cannot be cancelled. So the caller waits only until its own deadline, and `on_end`
releases the call's resources (staging slots). `on_end` runs exactly once, when nothing can touch the
resources any more:

1. after the call has returned, if a thread has begun it;
2. at once, if the call could not be queued;
3. as soon as the call is abandoned (`abandon`), if it is still queued then. The waiting thread abandons a
   call whose deadline has passed.

A lock that only one side can get decides whether a call is begun or dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from transfer.deadlines import left

_LOOK_S = 0.15
"""How often a waiting thread checks whether its call is queued behind a late call."""

T = TypeVar("T")
D = TypeVar("D")


class Call(Generic[T]):
    """A call under way. `_done` is locked until the outcome is there, because a lock is the cheapest way for
    a thread to wait."""

    __slots__ = (
        "_args",
        "_done",
        "_error",
        "_function",
        "_on_end",
        "_taken",
        "_threads",
        "_value",
        "deadline",
        "had_s",
        "started",
    )

    def __init__(
        self,
        threads: CallThreads,
        function: Callable[..., T],
        args: tuple[Any, ...],
        deadline: float,
        on_end: Callable[[], None] | None,
    ) -> None:
        self._threads = threads
        self._function: Callable[..., T] | None = function
        self._args = args
        self._on_end = on_end
        self._value: T | None = None
        self._error: BaseException | None = None
        self._taken = threading.Lock()
        """Held once it is decided whether the call is begun or dropped."""
        self._done = threading.Lock()
        self._done.acquire()
        self.deadline = deadline
        self.had_s = 0.0
        """How many seconds were left until the deadline when a thread began the call."""
        self.started = False
        """Whether a thread has begun the call. No thread begins it after the deadline."""

    def outcome(self, otherwise: D) -> T | D:
        """Returns the call's result, or `otherwise` if the call has not ended by the deadline. Raises the
        call's exception."""
        while not self._done.acquire(timeout=max(0.0, min(_LOOK_S, self.deadline - time.monotonic()))):
            if time.monotonic() >= self.deadline:
                self.abandon()
                return otherwise
            if not self.started:
                self._threads.relieve()
        self._done.release()  # so that a second caller finds it, too
        if self._error is not None:
            raise self._error
        return otherwise if self._value is None else self._value

    def abandon(self) -> None:
        """Drops the call if it is still queued, so that its resources are released. Idempotent.

        Call this when no thread needs the outcome any more.
        """
        if self._taken.acquire(blocking=False):
            self._end()

    def _end(self) -> None:
        """Releases the call's resources. Call it once: with `_taken` held, or before it is queued. Never
        call it with the lock of `CallThreads` held, because `on_end` may take locks."""
        self._function, self._args = None, ()
        on_end, self._on_end = self._on_end, None
        try:
            if on_end is not None:
                on_end()  # first, because a thread that wakes up may lease slots again at once
        finally:
            self._done.release()


class CallThreads:
    """Runs calls in the order of submission, on `count` daemon threads. At most `limit` calls are queued or
    running, including dropped ones that are still in the queue.

    A thread whose call has outlived its deadline is *late*. Up to `spare` further threads take the place of
    late threads, so that a peer that hangs does not delay calls to other peers. The spare threads end when
    the late calls end.
    """

    def __init__(self, name: str, count: int, *, limit: int = 256, spare: int = 0) -> None:
        self._queue: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        self._name = name
        self._count = count
        self._spare = spare
        self._limit = limit
        self._lock = threading.RLock()
        self._running: dict[int, float] = {}
        """For each thread, the deadline of its call."""
        self._closed = False
        self._started = 0
        self._threads: list[threading.Thread] = []
        with self._lock:
            for _ in range(count):
                self._start_thread()

    def submit(
        self,
        function: Callable[..., T],
        deadline: float,
        on_end: Callable[[], None] | None = None,
        *args: Any,
    ) -> Call[T] | None:
        """Queues the call `function(*args)`. Runs `on_end` and returns None if all threads, including the
        spare threads, are late, if `limit` calls are under way, or after `close`."""
        call = Call(self, function, args, deadline, on_end)
        with self._lock:
            self.relieve()
            under_way = self._queue.qsize() + len(self._running)
            if not self._closed and self.late < len(self._threads) and under_way < self._limit:
                self._queue.put(call)  # type: ignore[arg-type]  # the queue ignores what the call returns
                return call
        call._end()
        return None

    @property
    def late(self) -> int:
        """How many threads are late."""
        with self._lock:
            now = time.monotonic()
            return sum(end <= now for end in self._running.values())

    def relieve(self) -> None:
        """Starts a spare thread if calls are queued behind late threads."""
        with self._lock:
            if self._closed or len(self._running) < len(self._threads):
                return
            further = len(self._threads) - self._count
            if self.late > further and further < self._spare:
                with contextlib.suppress(RuntimeError):  # no more threads: calls wait for the late ones
                    self._start_thread()

    def close(self, timeout: float) -> bool:
        """Refuses new calls, and waits for the accepted ones. Returns False if some still run after `timeout`
        seconds."""
        with self._lock:
            first, self._closed = not self._closed, True
            threads = list(self._threads)
            if first:
                for _ in threads:
                    self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(left(end))
        return not any(thread.is_alive() for thread in threads)

    def _start_thread(self) -> None:
        """Call with the lock held."""
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True)
        thread.start()
        self._threads.append(thread)

    # --- on the threads -------------------------------------------------------------------------------------

    def _work(self) -> None:
        me = threading.get_ident()
        while (call := self._queue.get()) is not None:
            if not call._taken.acquire(blocking=False):
                del call  # frees its arguments
                continue
            with self._lock:
                self._running[me] = call.deadline
            try:
                if (left := call.deadline - time.monotonic()) > 0:
                    call.had_s, call.started = left, True
                    assert call._function is not None
                    call._value = call._function(*call._args)
            except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
                call._error = error
            try:
                call._end()
            finally:
                with self._lock:
                    del self._running[me]
                    # late calls may have ended
                    superfluous = not self._closed and len(self._threads) > self._count + self.late
                    if superfluous:
                        self._threads.remove(threading.current_thread())
            del call
            if superfluous:
                return
