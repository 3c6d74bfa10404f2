"""Runs several programs as one: starts them in order, watches them, and stops them in reverse order.

    with Supervisor(settings) as supervisor, stop_on_signals() as stop:
        supervisor.start([[master], [store], [prefill, decode], [proxy]], stop)
        supervisor.wait(stop, restart=True)

A program is ready when it prints `ready NAME URL` (or `ready NAME`) on stdout. Everything else that it prints is passed on as `NAME |
line`. `launch.process` explains how processes are kept from outliving the supervisor.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from launch.process import LocalProcesses, OnLine, Process, Program, Stream, end
from launch.signals import StopFlag, stop_on_signals
from pd_cache.cluster import SupervisorConfig
from pd_cache.errors import PdCacheError

log = logging.getLogger(__name__)

_POLL_S = 0.05
_TAIL = 20
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 1.0, 30.0
_STEADY_S = 60.0

Spawn = Callable[[Program, OnLine], Process]


class StopEvent(Protocol):
    """A `threading.Event`, or the flag of `stop_on_signals`."""

    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class SupervisorError(PdCacheError):
    """A program that could not be started, was not ready in time, or ended. The message shows its last lines."""

    def __init__(self, name: str, what: str, status: int | None = None, tail: Sequence[str] = ()) -> None:
        shown = "".join(f"\n  {name} | {line}" for line in tail)
        super().__init__(f"{name}: {what}" + (f"; its last output:{shown}" if tail else "; it printed nothing"))
        self.name = name
        self.status = status
        """The exit status, negative for a signal's number; None if it did not end by itself."""
        self.tail = tuple(tail)


def backoff_s(failures: int) -> float:
    """Returns the seconds to wait before the restart after this many failures in a row: 1, 2, 4 … 30."""
    return min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16))


def to_stderr(line: str) -> None:
    """Writes a line to stderr: a supervisor's sink when a person watches."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class _Watched:
    """A program and its state. `process` is None while the program waits for its restart."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.process: Process | None = None
        self.url: str | None = None
        """None until the program is ready, empty if it has no URL."""
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.started = 0.0
        self.failures = 0
        self.retry_at = 0.0


class Supervisor:
    """Starts, watches and stops programs. Use it on one thread, which must live as long as the programs.

    `sink` is called with whole lines, one at a time, from other threads. Tests replace `clock` (seconds), `sleep` and `spawn`.
    """

    def __init__(
        self,
        settings: SupervisorConfig,
        *,
        sink: Callable[[str], None] = to_stderr,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spawn: Spawn | None = None,
    ) -> None:
        self._settings = settings
        self._sink = sink
        self._clock = clock
        self._sleep = sleep
        self._local = LocalProcesses(settings.stop_grace_s)
        self._spawn: Spawn = spawn or self._local.spawn
        self._lines = threading.Lock()
        self._groups: list[list[_Watched]] = []
        self._stopped = False

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def ready_urls(self) -> dict[str, str]:
        """The URL that each ready program announced; empty if it has none."""
        return {w.program.name: w.url for w in self._all() if w.process is not None and w.url is not None}

    @property
    def pids(self) -> dict[str, int]:
        """The pids of the programs' processes, by name. A process that was found dead is left out."""
        return {w.program.name: w.process.pid for w in self._all() if w.process is not None}

    def start(self, programs: Sequence[Program | Sequence[Program]], stop_event: StopEvent | None = None) -> bool:
        """Starts programs one after the other, each when the one before is ready. Starts those of an inner list together.

        Returns True once all are ready, False if `stop_event` was set first. Raises SupervisorError, with everything stopped, if a program
        cannot be started, ends (even one of an earlier group), or is not ready within `ready_timeout_s` of its start.
        """
        if self._stopped:
            raise ValueError("this supervisor was stopped; make a new one")
        groups = [[entry] if isinstance(entry, Program) else list(entry) for entry in programs]
        names = [program.name for group in groups for program in group] + [w.program.name for w in self._all()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two programs have the same name: {', '.join(sorted(twice))}")
        try:
            for group in groups:
                batch = [_Watched(program) for program in group]
                self._groups.append(batch)
                for watched in batch:
                    self._launch(watched)
                if not self._await_ready(batch, stop_event):
                    return False
        except BaseException:
            self.stop()
            raise
        return True

    def wait(self, stop_event: StopEvent, *, restart: bool = False) -> None:
        """Watches the programs until `stop_event` is set. The programs still run then; leaving the `with` block stops them.

        With `restart`, a program that ends is started again after 1, 2, 4 … 30 s (from 1 s again once it has run for 60 s). Without it,
        everything is stopped, and SupervisorError is raised.
        """
        try:
            while not stop_event.wait(_POLL_S):
                for watched in self._all():
                    self._tend(watched, restart)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops everything, the last group first: SIGTERM, and SIGKILL after `stop_grace_s`. Does nothing the second time.

        When it returns, no process and no thread of the supervisor is left.
        """
        self._stopped = True
        while self._groups:
            self._stop_group(self._groups[-1])
            self._groups.pop()  # only now, so that the next call continues a stop that was interrupted
        self._local.close()

    def _all(self) -> Iterator[_Watched]:
        return (watched for group in self._groups for watched in group)

    def _launch(self, watched: _Watched) -> None:
        watched.url = None
        watched.tail.clear()
        watched.started = self._clock()
        program = watched.program

        def on_line(stream: Stream, line: str) -> None:
            if stream == "stdout" and watched.url is None:
                words = line.split()
                if words[:2] == ["ready", program.name] and len(words) <= 3:
                    watched.url = words[2] if len(words) == 3 else ""
                    return
            with self._lines:
                watched.tail.append(line)
                self._sink(f"{program.name} | {line}")

        try:
            watched.process = self._spawn(program, on_line)
        except OSError as error:
            raise SupervisorError(program.name, f"cannot be started: {error}") from error

    def _await_ready(self, batch: list[_Watched], stop_event: StopEvent | None) -> bool:
        limit = self._settings.ready_timeout_s
        while True:
            for watched in self._all():
                if watched.process is not None and (status := watched.process.poll()) is not None:
                    when = "ended" if watched.url is not None else "ended before it was ready"
                    raise self._error(watched, f"{when}: {_told(status)}", status)
            waiting = [watched for watched in batch if watched.url is None]
            if not waiting:
                return True
            if stop_event is not None and stop_event.is_set():
                return False
            for watched in waiting:
                if self._clock() - watched.started >= limit:
                    raise self._error(watched, f"was not ready within {limit:g} s")
            self._sleep(_POLL_S)

    def _tend(self, watched: _Watched, restart: bool) -> None:
        now = self._clock()
        if watched.process is None:
            if now >= watched.retry_at:
                try:
                    self._launch(watched)
                except SupervisorError as error:
                    self._retry_later(watched, str(error))
            return
        status = watched.process.poll()
        if status is not None:
            if not restart:
                raise self._error(watched, f"ended: {_told(status)}", status)
            self._retry_later(watched, f"ended: {_told(status)}")
        elif watched.url is None and now - watched.started >= self._settings.ready_timeout_s:
            # no grace, because it never became ready and the others must be watched meanwhile
            end([watched.process], 0, ask=False, clock=self._clock, sleep=self._sleep)
            self._retry_later(watched, f"was not ready within {self._settings.ready_timeout_s:g} s")

    def _retry_later(self, watched: _Watched, what: str) -> None:
        now = self._clock()
        watched.process = None
        watched.failures = 1 if now - watched.started >= _STEADY_S else watched.failures + 1
        delay = backoff_s(watched.failures)
        watched.retry_at = now + delay
        log.warning("%s %s; starting it again in %g s", watched.program.name, what, delay)

    def _stop_group(self, group: list[_Watched]) -> None:
        named = {w.process: w.program.name for w in group if w.process is not None}
        killed = end(named, self._settings.stop_grace_s, clock=self._clock, sleep=self._sleep)
        if killed:
            names = ", ".join(sorted(named[process] for process in killed))
            log.warning("%s did not stop within %g s and was killed", names, self._settings.stop_grace_s)

    def _error(self, watched: _Watched, what: str, status: int | None = None) -> SupervisorError:
        with self._lines:
            return SupervisorError(watched.program.name, what, status, tuple(watched.tail))


def _told(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


__all__ = [
    "Program",
    "StopEvent",
    "StopFlag",
    "Supervisor",
    "SupervisorError",
    "backoff_s",
    "stop_on_signals",
    "to_stderr",
]
