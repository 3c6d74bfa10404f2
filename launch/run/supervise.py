"""Runs programs as children: starts them in order, watches them, and stops them in order.

    with Supervisor(settings) as supervisor, stop_on_signals() as stop:
        supervisor.start([[master], [store], [prefill, decode], [proxy]], stop)
        supervisor.wait(stop)

A program is ready when it prints `ready NAME URL` (or `ready NAME`) on stdout. Everything else that it prints
is passed on as `NAME | line`. Two layers make sure that nothing is left behind:

1. The kernel signals a child when its parent ends, however that happens (`_tethered`; Linux).
2. Each program leads a session of its own, and with it a process group. A Ctrl-C at the terminal therefore
   reaches the supervisor alone, which stops all programs in order. When a leader is gone, the rest of its
   group, its own children, is killed.

If the supervisor itself is killed, a program that ignores SIGTERM goes on, and so does a descendant in a
session of its own. systemd and Kubernetes end these, too.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from launch.run import _tethered
from pd_cache.cluster import SupervisorConfig
from pd_cache.errors import PdCacheError

log = logging.getLogger(__name__)

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[Stream, str], None]
"""Called on a thread of the child's own with each line, without its end."""

_POLL_S = 0.05
_LOOK_S = 0.1
"""The pause between two checks whether a stop was requested."""
_KILLED_S = 5.0
"""How long a killed process may take to disappear. It takes longer only if the kernel itself hangs on it."""
_LONGEST_LINE = 64 << 10
"""In bytes; longer lines are passed on in pieces."""
_DRAIN_S = 1.0
"""How long to wait for the last output of a program that ended: a descendant that escaped may hold its pipes
open for ever."""
_TAIL = 20
# Mooncake prints them whenever it starts and ends: it logs before it sets glog up, registers each segment
# twice, and writes out all of the master's flags.
_FALSE_ALARMS = (
    "Logging before InitGoogleLogging()", "warn=segment_already_exists", "] Master service started on port ", "] Master admin server started",
    "] Task cleanup thread st", "Storage root directory or cluster ID is not set", "] Shutdown signal received",
)  # fmt: skip
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 1.0, 30.0
_STEADY_S = 60.0


class RoleError(PdCacheError):
    """A role cannot do its work."""


class SupervisorError(PdCacheError):
    """A program that could not be started, was not ready in time, or ended. The message shows its last
    lines."""

    def __init__(self, name: str, what: str, tail: Sequence[str] = ()) -> None:
        shown = "".join(f"\n  {name} | {line}" for line in tail)
        super().__init__(
            f"{name}: {what}" + (f"; its last output:{shown}" if tail else "; it printed nothing")
        )


# --- requests to stop ---------------------------------------------------------------------------------------


class StopFlag:
    """An event that a signal handler may set. It takes no lock: the handler may have interrupted the thread
    that holds it."""

    def __init__(self) -> None:
        self._set = False
        self.signal = 0
        """The signal that set it; 0 if none did."""

    def set(self, signum: int = 0, _frame: object = None) -> None:
        self.signal = self.signal or signum
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Waits up to `timeout` seconds, for ever by default. Returns True if it is set."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._set and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        return self._set


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask a process to stop. SIGHUP is left out if it is ignored: that is how
    `nohup` works."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Yields a flag that SIGTERM, SIGINT and SIGHUP set while the block runs. Main thread only: raises
    ValueError elsewhere.

    The handler raises nothing: an exception could leave a lock held for ever, because `threading.Condition`
    takes its lock in Python code.
    """
    flag = StopFlag()
    before = {number: signal.signal(number, flag.set) for number in stop_signals()}
    # if a parent left it ignored, the kernel reaps our children, and their exit codes are lost
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield flag
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


# --- children -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program to run. `argv[0]` is a path or is looked up in PATH.

    `env` is added to this process's environment; PYTHONUNBUFFERED and PYTHONSAFEPATH are set unless they
    already were.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None


class Process(Protocol):
    """A started program. A `subprocess.Popen` is one, too."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Returns the exit status (negative: the signal's number) once the process has ended and all of its
        output was passed on."""

    def terminate(self) -> None:
        """Asks the process to stop. No error if it has ended already."""

    def kill(self) -> None:
        """Kills the process, and a supervised one's process group. No error if it has ended already."""


Spawn = Callable[[Program, OnLine], Process]


def end(
    processes: Iterable[Process],
    grace_s: float,
    *,
    ask: bool = True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Process]:
    """Ends processes: asks all of them to stop, and kills those that have not ended after `grace_s` seconds.
    Returns the killed ones. With `ask=False`, the caller has already asked them to stop; with a grace of 0,
    they are killed immediately. On return all have ended, except those that the kernel does not end within
    five seconds of being killed: these are logged.
    """
    running = [process for process in processes if process.poll() is None]

    def wait(seconds: float) -> None:
        deadline = clock() + seconds
        while running and clock() < deadline:
            sleep(_POLL_S)
            running[:] = [process for process in running if process.poll() is None]

    if ask:
        for process in running:
            process.terminate()
    wait(grace_s)
    killed = list(running)
    for process in killed:
        process.kill()
    wait(_KILLED_S)
    for process in running:
        log.error("process %d does not end even when killed", process.pid)
    return killed


def spawn_child(
    argv: Sequence[str],
    *,
    death_signal: signal.Signals = signal.SIGKILL,
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Starts another project's program, in a session of its own. The kernel sends it `death_signal` when this
    process ends.

    `popen` goes to `subprocess.Popen`; stdin is /dev/null unless given. Raises FileNotFoundError if there is
    no such program.

    Call this on a thread that lives as long as the process (the main thread), because the kernel sends the
    signal when the *thread* that started the child ends.
    """
    file = shutil.which(argv[0], path=(popen.get("env") or os.environ).get("PATH"))
    if file is None:
        raise FileNotFoundError(f"{argv[0]}: no such program, or not executable")
    script = str(Path(_tethered.__file__).resolve())
    tether = (sys.executable, "-I", "-S", script, str(os.getpid()), str(int(death_signal)))
    popen.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([*tether, file, *argv], start_new_session=True, **popen)


class Child:
    """A program that was started in a session of its own. Make it, as `spawn_child`, on a thread that lives
    long enough.

    Raises OSError if the program cannot be started.
    """

    def __init__(self, program: Program, on_line: OnLine) -> None:
        # unbuffered: lines come as they are printed, and a traceback stays the last of them.
        # safe path: a `launch.py` or `transfer/` in the working directory is not our package
        env = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **os.environ, **(program.env or {})}
        pipe = subprocess.PIPE
        self._popen = spawn_child(
            program.argv, death_signal=signal.SIGTERM, env=env, stdout=pipe, stderr=pipe
        )
        pipes: dict[Stream, IO[bytes] | None] = {"stdout": self._popen.stdout, "stderr": self._popen.stderr}
        self._readers = [
            threading.Thread(
                target=_read_lines, args=(stream, pipe, on_line), name=f"{stream}-{program.name}", daemon=True
            )
            for stream, pipe in pipes.items()
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        # Popen.poll and Popen.terminate reap, so they are not used: only an unreaped leader holds the group's
        # number
        if self._popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._send(os.killpg, signal.SIGKILL)
            self._popen.wait()
            for reader in self._readers:
                reader.join(_DRAIN_S)
        return self._popen.returncode

    def terminate(self) -> None:
        self._send(os.kill, signal.SIGTERM)

    def kill(self) -> None:
        self._send(os.killpg, signal.SIGKILL)

    def _send(self, send: Callable[[int, int], None], signum: int) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                send(self.pid, signum)


def _read_lines(stream: Stream, pipe: IO[bytes], on_line: OnLine) -> None:
    """Passes on a child's lines until the last process that holds the pipe has closed it."""
    with pipe:
        while line := pipe.readline(_LONGEST_LINE):
            try:
                on_line(stream, line.decode("utf-8", "replace").rstrip("\r\n"))
            except Exception:  # a sink that fails must not leave the child blocked on a full pipe
                log.debug("a line of output was lost", exc_info=True)


# --- one program of others, as the child of a role ----------------------------------------------------------


class ForeignProgram:
    """A foreign program that a role runs: Mooncake's master, or vLLM. Entering the context starts it, leaving
    ends it."""

    def __init__(
        self, name: str, spawn: Callable[[], Process], grace_s: float, hint: Callable[[], str]
    ) -> None:
        """`spawn` starts the program. It has `grace_s` seconds to end by itself before it is killed. `hint`
        names a likely cause of trouble."""
        self._name = name
        self._spawn = spawn
        self._grace_s = grace_s
        self._hint = hint

    def __enter__(self) -> ForeignProgram:
        self._child = self._spawn()
        return self

    def __exit__(self, *_: object) -> None:
        end([self._child], self._grace_s)

    def wait_serving(self, stop: StopFlag, serving: Callable[[], bool], timeout_s: float) -> bool:
        """Returns True once `serving()` is true, or False when `stop` is set.

        Raises RoleError if the program ends by itself, or does not serve within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not stop.is_set() and not serving():
            self._check(f" before it served; {self._hint()}")
            if time.monotonic() > deadline:
                raise RoleError(f"{self._name} not serving in time; {self._hint()}")
            stop.wait(_POLL_S)
        return not stop.is_set()

    def watch(self, stop: StopFlag, anew: Callable[[], bool] | None = None) -> None:
        """Returns when `stop` is set. Raises RoleError if the program ends by itself. Starts it again
        whenever `anew()` is true."""
        while not stop.wait(_LOOK_S):
            self._check("; its own last lines say why, and without any it was killed")
            if anew is not None and anew():
                log.warning("restarting %s", self._name)
                end([self._child], self._grace_s)
                self._child = self._spawn()

    def _check(self, when: str) -> None:
        if (status := self._child.poll()) is not None:
            raise RoleError(f"{self._name} ended with {status}{when}")


# --- several programs as one --------------------------------------------------------------------------------


def to_stderr(line: str) -> None:
    """Writes a line to stderr: a supervisor's sink when a person watches."""
    print(line, file=sys.stderr, flush=True)


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

    `sink` is called with whole lines, one at a time, from other threads: `NAME | line`, and `ready NAME URL`
    whenever a program is ready. Tests replace `clock` (seconds), `sleep` and `spawn`.
    """

    def __init__(
        self,
        settings: SupervisorConfig,
        *,
        sink: Callable[[str], None] = to_stderr,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        spawn: Spawn = Child,
    ) -> None:
        self._settings = settings
        self._sink = sink
        self._clock = clock
        self._sleep = sleep
        self._spawn = spawn
        self._lines = threading.Lock()
        self._groups: list[list[_Watched]] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def ready_urls(self) -> dict[str, str]:
        """The URL that each ready program announced; empty if it has none."""
        return {w.program.name: w.url for w in self._all() if w.process is not None and w.url is not None}

    @property
    def pids(self) -> dict[str, int]:
        """The pids of the programs' processes, by name. A process that was found dead is left out."""
        return {w.program.name: w.process.pid for w in self._all() if w.process is not None}

    def start(
        self, programs: Sequence[Program | Sequence[Program]], stop_event: StopFlag | None = None
    ) -> bool:
        """Starts programs in order, each when the program before it is ready. The programs of an inner list
        start together.

        Returns True once all are ready, False if `stop_event` was set first. Raises SupervisorError, with
        everything stopped, if a program cannot be started, ends (even one of an earlier group), or is not
        ready within `ready_timeout_s` of its start. Names must differ.
        """
        try:
            for entry in programs:
                batch = [_Watched(program) for program in ([entry] if isinstance(entry, Program) else entry)]
                self._groups.append(batch)
                for watched in batch:
                    self._launch(watched)
                if not self._await_ready(batch, stop_event):
                    return False
        except BaseException:
            self.stop()
            raise
        return True

    def wait(self, stop_event: StopFlag) -> None:
        """Watches the programs until `stop_event` is set. Leaving the `with` block then stops them.

        A program that ends is started again after 1, 2, 4 … 30 s (from 1 s again once it has run for 60 s).
        """
        while not stop_event.wait(_POLL_S):
            for watched in self._all():
                self._tend(watched)

    def stop(self) -> None:
        """Stops everything, the last group first: SIGTERM, and SIGKILL after `stop_grace_s`. Does nothing the
        second time.

        When it returns, no process and no thread of the supervisor is left.
        """
        while self._groups:
            named = {w.process: w.program.name for w in self._groups[-1] if w.process is not None}
            if named:
                log.info("stopping %s", ", ".join(named.values()))
            killed = end(named, self._settings.stop_grace_s, clock=self._clock, sleep=self._sleep)
            if killed:
                names = ", ".join(sorted(named[process] for process in killed))
                log.warning("%s did not stop within %g s and was killed", names, self._settings.stop_grace_s)
            self._groups.pop()  # only now, so that the next call continues a stop that was interrupted

    def _all(self) -> Iterator[_Watched]:
        return (watched for group in self._groups for watched in group)

    def _launch(self, watched: _Watched) -> None:
        watched.url = None
        watched.tail.clear()
        watched.started = self._clock()
        program = watched.program
        log.info("starting %s", program.name)

        def on_line(stream: Stream, line: str) -> None:
            if stream == "stdout" and watched.url is None:
                words = line.split()
                if words[:2] == ["ready", program.name] and len(words) <= 3:
                    try:
                        with self._lines:
                            self._sink(" ".join(words))
                    finally:
                        watched.url = words[2] if len(words) == 3 else ""
                    return
            if any(alarm in line for alarm in _FALSE_ALARMS):
                return
            with self._lines:
                watched.tail.append(line)
                self._sink(f"{program.name} | {line}")

        try:
            watched.process = self._spawn(program, on_line)
        except OSError as error:
            raise SupervisorError(program.name, f"cannot be started: {error}") from error

    def _await_ready(self, batch: list[_Watched], stop_event: StopFlag | None) -> bool:
        limit = self._settings.ready_timeout_s
        while True:
            for watched in self._all():
                if watched.process is not None and (status := watched.process.poll()) is not None:
                    when = "ended" if watched.url is not None else "ended before it was ready"
                    raise self._error(watched, f"{when}: {_shown_status(status)}")
            waiting = [watched for watched in batch if watched.url is None]
            if not waiting:
                return True
            if stop_event is not None and stop_event.is_set():
                return False
            for watched in waiting:
                if self._clock() - watched.started >= limit:
                    raise self._error(watched, f"was not ready within {limit:g} s")
            self._sleep(_POLL_S)

    def _tend(self, watched: _Watched) -> None:
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
            self._retry_later(watched, f"ended: {_shown_status(status)}")
        elif watched.url is None and now - watched.started >= self._settings.ready_timeout_s:
            # no grace, because it never became ready and the others must be watched meanwhile
            end([watched.process], 0, ask=False, clock=self._clock, sleep=self._sleep)
            self._retry_later(watched, f"was not ready within {self._settings.ready_timeout_s:g} s")

    def _retry_later(self, watched: _Watched, what: str) -> None:
        now = self._clock()
        watched.process = None
        watched.failures = 1 if now - watched.started >= _STEADY_S else watched.failures + 1
        delay = min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(watched.failures - 1, 16))
        watched.retry_at = now + delay
        log.warning("%s %s; starting it again in %g s", watched.program.name, what, delay)

    def _error(self, watched: _Watched, what: str) -> SupervisorError:
        with self._lines:
            return SupervisorError(watched.program.name, what, tuple(watched.tail))


def _shown_status(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
