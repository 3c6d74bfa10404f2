"""One orderly stop for every request to stop: SIGTERM, Ctrl-C, a closed terminal."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

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
    try:
        with _handling(lambda number: flag.set()):
            yield flag
    finally:
        flag.close()


class StoppedError(BaseException):
    """A signal asked the process to stop, while `signals_as_exceptions` was in force."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Makes signals that ask to stop raise StoppedError, so that what was opened is closed. Main thread only."""

    def stop(number: int) -> NoReturn:
        raise StoppedError(number)

    with _handling(stop):
        yield


@contextmanager
def _handling(handle: Callable[[int], None]) -> Iterator[None]:
    """Has signals that ask to stop go to `handle` while the block runs, and to their earlier handlers after that.

    Those that come while handlers are exchanged are dealt with when all are.
    """
    inside = False
    meanwhile: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if inside:
            handle(number)
        else:
            meanwhile.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in stop_signals():
            before[number] = signal.getsignal(number)
            signal.signal(number, on_signal)
        try:
            inside = True
            while meanwhile:
                handle(meanwhile.pop())
            yield
        finally:
            inside = False
    finally:
        inside = False  # again, because a signal may have come just before the first time
        _give_back(before, meanwhile)


def _give_back(before: Mapping[signal.Signals, Any], meanwhile: list[int]) -> None:
    """Gives signals back to their earlier handlers, and has them deal with those that came `meanwhile`. Raises what a handler raises, but
    only at the end."""
    raised: BaseException | None = None
    while True:
        try:
            for number, handler in before.items():
                signal.signal(number, handler)
            while meanwhile:
                signal.raise_signal(meanwhile.pop())
            break
        except BaseException as error:  # noqa: BLE001 - from a handler, such as Python's own for SIGINT
            raised = error
    if raised is not None:
        raise raised
