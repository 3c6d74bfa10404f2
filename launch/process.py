"""Child processes that do not outlive the process that started them.

Three layers make sure that nothing is left behind, whichever process is killed:

1. The kernel signals a child when its parent dies (`die_with_parent`, `spawn_child`; Linux).
2. Each supervised program leads a session of its own, and with it a process group. A Ctrl-C at the terminal therefore
   reaches the supervisor alone, which stops all programs in order. When a leader is gone, the rest of its group,
   its own children, is killed.
3. A guardian process holds the other end of a pipe and does the same for a supervisor that was killed.

The only process that escapes is a descendant that was started by other means *and* moved into a session of its own.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar

from launch import _guardian, _tethered

log = logging.getLogger(__name__)

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[Stream, str], None]
"""Called on a thread of the child's own with each line, without its end."""

_END_POLL_S = 0.02
_KILLED_S = 5.0
"""How long a killed process may take to disappear. It takes longer only if the kernel itself hangs on it."""
_LONGEST_LINE = 64 << 10
"""In bytes; longer lines are passed on in pieces."""


@dataclass(frozen=True)
class Program:
    """A program to run. `argv[0]` is a path or is looked up in PATH.

    `env` is added to this process's environment; PYTHONUNBUFFERED is set unless it already was.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None


class Process(Protocol):
    """A started program, as the supervisor sees it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Returns the exit status (negative: the signal's number) once the process has ended and all of its output was passed on."""

    def terminate(self) -> None:
        """Asks the process to stop. No error if it has ended already."""

    def kill(self) -> None:
        """Kills the process and its process group. No error if it has ended already."""


class Endable(Protocol):
    """The methods that `end` needs, of `Process` or `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


E = TypeVar("E", bound=Endable)


def end(
    processes: Iterable[E],
    grace_s: float,
    *,
    ask: bool = True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[E]:
    """Ends processes: asks all of them to stop, and kills those that have not ended after `grace_s` seconds. Returns those.

    With `ask=False`, they have been asked in another way, or, with a grace of 0, are killed immediately. On return all have ended, except
    those that the kernel does not end within five seconds of being killed: these are logged.
    """
    running = [process for process in processes if process.poll() is None]

    def wait(seconds: float) -> None:
        deadline = clock() + seconds
        while running and clock() < deadline:
            sleep(_END_POLL_S)
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


def die_with_parent(signum: signal.Signals = signal.SIGTERM, *, parent: int | None = None, poll_s: float = 0.5) -> None:
    """Makes the kernel send `signum` to this process when its parent ends, however it ends.

    `parent`: the parent's pid, passed by the parent, which closes the gap between our start and this call. Without it, a parent that is
    already dead goes unnoticed. If the kernel does not offer this, a daemon thread looks every `poll_s` seconds.
    """
    expected = os.getppid() if parent is None else parent
    if _tethered.set_death_signal(signum):
        if os.getppid() != expected:  # it died before the kernel knew
            os.kill(os.getpid(), signum)
        return

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(poll_s)
        os.kill(os.getpid(), signum)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def spawn_child(
    argv: Sequence[str],
    *,
    death_signal: signal.Signals = signal.SIGKILL,
    blocked: Iterable[signal.Signals] = (),
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Starts a foreign binary that cannot call `die_with_parent` itself. It is sent `death_signal` when this process ends.

    The child stays in our process group, so that it ends with the group. It starts with SIGINT ignored: a Ctrl-C is ours to handle.
    `blocked` are signals that it starts with blocked, for a child that waits for them itself. `popen` goes to `subprocess.Popen`; stdin
    is /dev/null unless given. Raises FileNotFoundError if there is no such program.

    Call this on a thread that lives as long as the process (the main thread): the kernel takes the end of the *thread* that started a
    child for the end of its parent.
    """
    popen.setdefault("stdin", subprocess.DEVNULL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return subprocess.Popen(_tether(argv, death_signal, "ignore", popen.get("env")), **popen)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tether(
    argv: Sequence[str], death_signal: signal.Signals, interrupt: str, env: Mapping[str, str] | None
) -> list[str]:
    file = shutil.which(argv[0], path=(os.environ if env is None else env).get("PATH"))
    if file is None:
        raise FileNotFoundError(f"{argv[0]}: no such program, or not executable")
    script = str(Path(_tethered.__file__).resolve())
    tether = [sys.executable, "-I", "-S", script, str(os.getpid()), str(int(death_signal)), interrupt]
    return [*tether, file, *argv]


class LocalProcesses:
    """Starts programs on this host, guarded. Call `spawn`, like `spawn_child`, on a thread that lives long enough."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._guardian: _Guardian | None = None

    def spawn(self, program: Program, on_line: OnLine) -> Process:
        """Starts `program`, in a session of its own. Raises OSError if it cannot be started."""
        if self._guardian is None:
            self._guardian = _Guardian(self._grace_s)
        child = _Child(program, on_line, self._guardian.forget)
        # if we are killed between these two lines, the kernel's signal ends the child
        self._guardian.watch(child.pid)
        return child

    def close(self) -> None:
        """Ends the guardian, which ends processes that still run."""
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.close()


class _Guardian:
    def __init__(self, grace_s: float) -> None:
        script = str(Path(_guardian.__file__).resolve())
        self._grace_s = grace_s
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def watch(self, pid: int) -> None:
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except OSError as error:
            log.warning("the guardian process is gone (%s): children end with us only by the kernel's signal", error)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        end([self._process], self._grace_s + 5, ask=False)


class _Child:
    def __init__(self, program: Program, on_line: OnLine, on_reaped: Callable[[int], None]) -> None:
        # unbuffered: lines come as they are printed, and a traceback stays the last of them
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **(program.env or {})}
        self._popen = subprocess.Popen(
            _tether(program.argv, signal.SIGTERM, "keep", env),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._on_reaped = on_reaped
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._output = _OutputReader(
            program.name, {"stdout": self._popen.stdout, "stderr": self._popen.stderr}, on_line
        )
        self._output.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        # Popen.poll and Popen.terminate reap, so they are not used: only an unreaped leader holds the group's number
        if self._popen.returncode is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
            except ChildProcessError:
                pass  # another thread or handler reaped it
            else:
                self._send(os.killpg, signal.SIGKILL)
            self._popen.wait()
            self._output.finish()
            self._on_reaped(self.pid)
        return self._popen.returncode

    def terminate(self) -> None:
        if self._popen.returncode is None:
            self._send(os.kill, signal.SIGTERM)

    def kill(self) -> None:
        if self._popen.returncode is None:
            self._send(os.killpg, signal.SIGKILL)

    def _send(self, send: Callable[[int, int], None], signum: int) -> None:
        try:
            send(self.pid, signum)
        except ProcessLookupError:
            pass


class _OutputReader(threading.Thread):
    """Reads a child's pipes as lines until they end, or until `finish`: a descendant may hold them open for ever."""

    def __init__(self, name: str, pipes: Mapping[Stream, IO[bytes]], on_line: OnLine) -> None:
        super().__init__(name=f"output-{name}", daemon=True)
        self._pipes = pipes
        self._on_line = on_line
        self._partial: dict[Stream, bytes] = dict.fromkeys(pipes, b"")
        self._finish_read, self._finish_write = os.pipe()

    def finish(self) -> None:
        """Passes on what is there already, then ends. The writers must be gone."""
        os.write(self._finish_write, b"!")
        self.join()
        os.close(self._finish_write)
        os.close(self._finish_read)
        for pipe in self._pipes.values():
            pipe.close()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._finish_read, selectors.EVENT_READ, None)
            for stream, pipe in self._pipes.items():
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, stream)
            finishing = False
            while not finishing and len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.data is None:
                        finishing = True
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
        for stream in self._pipes:
            # bounded: an escaped descendant may write faster than we read
            for _ in range(64):
                if not self._read(stream):
                    break
            if rest := self._partial[stream]:
                self._pass_on(stream, rest)

    def _read(self, stream: Stream) -> bool:
        try:
            data = os.read(self._pipes[stream].fileno(), _LONGEST_LINE)
        except BlockingIOError:
            return False
        *lines, rest = (self._partial[stream] + data).split(b"\n")
        for line in lines:
            self._pass_on(stream, line)
        if len(rest) >= _LONGEST_LINE:
            self._pass_on(stream, rest)
            rest = b""
        self._partial[stream] = rest
        return bool(data)

    def _pass_on(self, stream: Stream, line: bytes) -> None:
        try:
            self._on_line(stream, line.decode("utf-8", "replace").rstrip("\r"))
        except Exception:  # a sink that fails must not leave the child blocked on a full pipe
            log.debug("a line of output was lost", exc_info=True)
