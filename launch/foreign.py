"""Programs that are not ours and that a role runs as its child: Mooncake's master and client, and vLLM."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from launch.errors import RoleError
from launch.process import Endable, end
from launch.signals import StopFlag

_START_POLL_S = 0.05
_POLL_S = 0.2
_AGAIN_S = 1.0


class ForeignProgram:
    """One such program: entering the context starts it, leaving the context ends it."""

    def __init__(self, name: str, spawn: Callable[[], Endable], grace_s: float) -> None:
        """`spawn` starts the program. The program has `grace_s` seconds to end by itself before it is killed."""
        self._name = name
        self._spawn = spawn
        self._grace_s = grace_s
        self._child: Endable | None = None

    def __enter__(self) -> ForeignProgram:
        self._child = self._spawn()
        return self

    def run(
        self,
        stop: StopFlag,
        *,
        serving: Callable[[], bool],
        ready: Callable[[], None],
        deadline: float,
        hint: Callable[[], str],
        again: bool = False,
        anew: Callable[[], bool] = lambda: False,
    ) -> None:
        """Does `wait_serving`, calls `ready`, and returns when `stop` is set. Raises RoleError if the program ends by itself meanwhile.

        Ends the program and starts it again whenever `anew()` is true.
        """
        self.wait_serving(stop, serving=serving, deadline=deadline, hint=hint, again=again)
        if not stop.is_set():
            ready()
        while not stop.wait(_POLL_S):
            self._check(f"; {hint()}")
            if anew():
                self._end()
                self._child = self._spawn()

    def wait_serving(
        self,
        stop: StopFlag,
        *,
        serving: Callable[[], bool],
        deadline: float,
        hint: Callable[[], str],
        again: bool = False,
    ) -> None:
        """Returns when `serving()` is true, or `stop` is set.

        Raises RoleError if the program ends by itself, or does not serve by `deadline` (`time.monotonic()`). `hint` names a likely cause.
        With `again`, the program is restarted if it ends before it has served.
        """
        while not stop.is_set() and not serving():
            late = time.monotonic() > deadline
            if again and not late and self._poll() is not None:
                if stop.wait(_AGAIN_S):
                    return
                self._child = self._spawn()
            self._check(f" before it served; {hint()}")
            if late:
                raise RoleError(f"{self._name} not serving in time; {hint()}")
            stop.wait(_START_POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            end([self._child], self._grace_s)

    def _poll(self) -> int | None:
        assert self._child is not None
        return self._child.poll()

    def _check(self, where: str) -> None:
        status = self._poll()
        if status is not None:
            raise RoleError(f"{self._name} ended with {status}{where}")


def find_program(name: str) -> str | None:
    """Returns the path of a program beside this Python, or else in PATH; None if it is in neither."""
    beside = Path(sys.executable).parent / name  # this is the program itself if `name` is an absolute path
    return str(beside) if beside.is_file() else shutil.which(name)


def wheel_program(name: str) -> str:
    """Returns the path of one of the programs of Mooncake's wheel. Raises RoleError if the wheel is not installed."""
    path = find_program(name)
    if path is None:
        raise RoleError(f"{name} is not installed; install pd-cache with one of the extras cpu, cuda12, cuda13")
    return path
