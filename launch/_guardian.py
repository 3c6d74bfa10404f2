"""Outlives a supervisor that was killed, in order to stop what it left behind; otherwise ends with it.

    python -I -S _guardian.py GRACE_SECONDS < pipe from the supervisor

The pipe carries `+PID` for each process group that was started and `-PID` for each that is gone. If it ends with groups left, the
supervisor died. Then each leader is asked to stop (SIGTERM), the rest of a group is killed as soon as its leader is gone, and everything
is killed after the grace.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_POLL_S = 0.05


def _reached(send: Callable[[int, int], None], pid: int, signum: int) -> bool:
    try:
        send(pid, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _gone(leader: int) -> bool:
    """Returns whether a leader ended. Its new parent may take its time to reap it, so a zombie counts as gone."""
    try:
        with open(f"/proc/{leader}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in b"ZX"
    except OSError:
        return not _reached(os.kill, leader, 0)


def follow(lines: Iterable[bytes]) -> set[int]:
    """Returns the groups that are left when the supervisor's end of the pipe closes."""
    groups: set[int] = set()
    for line in lines:
        if line[:1] == b"+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    return groups


def end(groups: set[int], grace_s: float) -> None:
    """Stops process groups whose supervisor is gone. Returns when all are gone or killed."""
    for group in groups:
        _reached(os.kill, group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while groups:
        late = time.monotonic() >= deadline
        for group in list(groups):
            # a number stays reserved while its group has members, so this cannot reach another program's group
            if late or _gone(group):
                _reached(os.killpg, group, signal.SIGKILL)
                groups.discard(group)
        if late:
            return
        time.sleep(_POLL_S)


def main() -> None:
    # A stop that reaches all processes (a terminal, a service manager) is the supervisor's to handle.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    end(follow(sys.stdin.buffer), float(sys.argv[1]))


if __name__ == "__main__":
    main()
