"""Blocking calls on a bounded set of threads, waited for with a deadline.

A call into Mooncake cannot be cancelled. The caller therefore waits on its own clock, and `on_end` lets go of what the call was given
(staging slots). It runs exactly once, when nothing can touch it any more:

1. after the call returned, if a thread has begun it;
2. at once, if it could not be queued;
3. as soon as nobody waits for it any more (`abandon`), if it is still queued then. Its waiter abandons it when its deadline has passed,
   and so does everyone who needs what overdue calls were given (`CallThreads.drop_overdue`).

One lock, which only one side gets, decides whether a call is begun or dropped.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

_LOOK_S = 0.15
"""How often a waiter checks whether its call is queued behind one that is late."""

T = TypeVar("T")


def _nothing() -> None:
    return


class Call(Generic[T]):
    """One call under way. The lock is held until the outcome is there: the cheapest way for one thread to wait."""

    __slots__ = (
        "__weakref__",
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
        self, threads: CallThreads, function: Callable[[], T], deadline: float, on_end: Callable[[], None]
    ) -> None:
        self._threads = threads
        self._function: Callable[[], T] | None = function
        self._on_end = on_end
        self._value: T | None = None
        self._error: BaseException | None = None
        self._taken = threading.Lock()
        """Held once it is decided whether the call is begun or dropped."""
        self._done = threading.Lock()
        self._done.acquire()
        self.deadline = deadline
        self.had_s = 0.0
        """Seconds until its deadline when a thread took it up: how long it has had to end, if the deadline has passed."""
        self.started = False
        """Whether a thread has begun it; none ever does if the deadline passed first."""

    def outcome(self, otherwise: T) -> T:
        """Returns what the call returned, or `otherwise` if the call has not ended by the deadline. Raises what the call raised."""
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
        """To be called when nobody waits for it any more: a call that is still queued lets go of what it was given. Idempotent."""
        if self._taken.acquire(blocking=False):
            self._drop()

    def _run(self) -> None:
        """On a thread that holds `_taken`."""
        function, self._function = self._function, None
        assert function is not None
        try:
            if (left := self.deadline - time.monotonic()) > 0:
                self.had_s, self.started = left, True
                self._value = function()
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            self._error = error
        finally:
            # the slots first: a thread that wakes up may lease again at once
            self._on_end()
            self._done.release()

    def _drop(self) -> None:
        self._function = None
        self._on_end()
        self._done.release()


class CallThreads:
    """`count` daemon threads that run calls in the order of submission. At most `limit` calls are queued or running, including
    dropped ones that are still in the queue.

    A thread whose call has outlived its deadline is *late*. Up to `spare` further threads take the place of late ones, so
    that a peer that hangs does not hold up calls to others; they end when the late calls do.
    """

    def __init__(self, name: str, count: int, *, limit: int = 256, spare: int = 0) -> None:
        self._queue: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        self._waiting: collections.deque[weakref.ref[Call[object]]] = collections.deque()
        """The calls of the queue, and some that have left it: these are not kept, nor what they were given."""
        self._name = name
        self._count = count
        self._spare = spare
        self._limit = limit
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}
        """The deadline of each thread's call, by thread."""
        self._closed = False
        self._started = 0
        self._threads: list[threading.Thread] = []
        with self._lock:
            for _ in range(count):
                self._start_thread()

    def submit(
        self, function: Callable[[], T], deadline: float, on_end: Callable[[], None] = _nothing
    ) -> Call[T] | None:
        """Queue a call. Returns None, with `on_end` already run, if it could not start in time: every thread, spare ones too,
        is late, or `limit` calls are ahead."""
        call = Call(self, function, deadline, on_end)
        with self._lock:
            self._relieve()
            ahead = self._queue.qsize() + len(self._running)
            accepted = not self._closed and self._late() < len(self._threads) and ahead < self._limit
            if accepted:
                while self._waiting and ((first := self._waiting[0]()) is None or first._taken.locked()):
                    self._waiting.popleft()
                queued: Call[object] = call  # type: ignore[assignment]  # neither queue cares what the call returns
                self._waiting.append(weakref.ref(queued))
                self._queue.put(queued)
        if not accepted:
            call._drop()
            return None
        return call

    @property
    def late(self) -> int:
        """How many threads run a call that has outlived its deadline."""
        with self._lock:
            return self._late()

    def relieve(self) -> None:
        """Start a spare thread if calls are queued behind threads that are late."""
        with self._lock:
            self._relieve()

    def drop_overdue(self) -> None:
        """Have queued calls whose deadline has passed let go of what they were given, though nobody looks at them now."""
        now = time.monotonic()
        with self._lock:
            overdue = [call for one in self._waiting if (call := one()) is not None and call.deadline <= now]
        for call in overdue:
            call.abandon()

    def close(self, timeout: float) -> bool:
        """Refuse new calls and wait for those accepted. Returns False if some still run after `timeout` seconds."""
        with self._lock:
            first, self._closed = not self._closed, True
            threads = list(self._threads)
            if first:
                for _ in threads:
                    self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _late(self) -> int:
        now = time.monotonic()
        return sum(end <= now for end in self._running.values())

    def _relieve(self) -> None:
        if self._closed or len(self._running) < len(self._threads):
            return
        if self._late() > len(self._threads) - self._count and len(self._threads) < self._count + self._spare:
            self._start_thread()

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _is_superfluous(self) -> bool:
        """Whether the calling thread, which just finished a call, is not needed any more because late calls have ended."""
        return not self._closed and len(self._threads) > self._count + self._late()

    # --- on the threads -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        me = threading.get_ident()
        while (call := self._queue.get()) is not None:
            if not call._taken.acquire(blocking=False):
                del call  # and with it what it was given
                continue
            with self._lock:
                self._running[me] = call.deadline
            try:
                call._run()
            finally:
                with self._lock:
                    del self._running[me]
                    if superfluous := self._is_superfluous():
                        self._threads.remove(threading.current_thread())
            del call
            if superfluous:
                return
