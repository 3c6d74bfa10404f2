"""One orderly stop for every request to stop: SIGTERM, Ctrl-C, a closed terminal."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SLICE_S = 0.5
"""The most seconds between two looks at the flag. Python runs handlers between two instructions of the main thread, and a signal that comes
just before `poll` begins, or that interrupts another thread, does not end the `poll`."""


class StopFlag:
    """An event that a signal handler may set.

    A handler runs on the main thread, between any two instructions: `threading.Event.set` would wait there for a lock that the
    interrupted `wait` may hold. This class takes no lock. Close it after use, and do not use it after that.
    """

    def __init__(self) -> None:
        self._set = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def set(self) -> None:
        """Wakes every waiter, now and from now on."""
        self._set = True
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            pass  # full of wake-ups already

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds, for ever by default. Returns True if it is set."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._read, select.POLLIN)
        while not self._set and (left := end - time.monotonic()) > 0:
            poll.poll(1000 * min(left, _SLICE_S))
        return self._set

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask a process to stop. SIGHUP is left out if it is ignored: that is how `nohup` works."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Yields a flag that SIGTERM, SIGINT and SIGHUP set while the block runs. Main thread only: raises ValueError elsewhere."""
    flag = StopFlag()

    def handler(signum: int, frame: FrameType | None) -> None:
        flag.set()

    try:
        before = {signum: signal.signal(signum, handler) for signum in stop_signals()}
        try:
            yield flag
        finally:
            for signum, old in before.items():
                signal.signal(signum, old)
    finally:
        flag.close()


class StoppedError(BaseException):
    """A signal asked the process to stop, while `signals_as_exceptions` was in force."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Makes signals that ask to stop raise StoppedError, so that what was opened is closed. Main thread only.

    A signal that comes while handlers are exchanged is dealt with after that.
    """
    inside = False
    meanwhile: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if inside:
            raise StoppedError(number)
        meanwhile.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in stop_signals():
            before[number] = signal.getsignal(number)
            signal.signal(number, stop)
        try:
            inside = True
            if meanwhile:
                raise StoppedError(meanwhile.pop())
            yield
        finally:
            inside = False
    finally:
        inside = False  # again, because a signal may have come just before the first time
        for number, handler in before.items():
            signal.signal(number, handler)
        for missed in meanwhile:
            signal.raise_signal(missed)
