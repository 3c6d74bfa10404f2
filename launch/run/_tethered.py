"""Ties this process to its parent, then becomes another program.

    python -I -S _tethered.py PARENT_PID DEATH_SIGNAL FILE ARGV0 [ARG ...]

This is a program of its own because the alternative, a `preexec_fn`, has two faults. It runs Python between
fork and exec in a process that has threads. And it needs a real fork, which a process with registered memory
must not do. This program imports little, because it delays the start of every child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def set_death_signal(signum: int) -> None:
    """Asks the kernel to send this process `signum` when the thread that started it ends.

    The request survives exec (not of a set-user-id binary) and is not inherited by children.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def main(argv: list[str]) -> int:
    parent, signum, file, *command = argv
    set_death_signal(int(signum))
    if os.getppid() != int(parent):
        return 128 + int(signum)  # the parent died before the kernel got the request
    # Python ignores these two for itself; a foreign program expects the defaults
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execv(file, command)
    except OSError as error:
        print(f"{file}: cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
