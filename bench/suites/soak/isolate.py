"""Gives a run namespaces of its own: however it ends, the kernel removes what it has started and mounted.

`start_isolated` runs this program again as the first process of new namespaces (processes, network, mounts, shared memory). All
other processes there die with it; its links, mounts and shared memory vanish with the namespaces. Inside, `enter` covers the folders in
which a run may leave something with empty file systems, so that everything found there afterwards is the run's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from launch.process import end, spawn_child

SHARED_MEMORY = Path("/dev/shm")
_COVERED = (Path("/run"), SHARED_MEMORY)
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL", "--mount-proc")
_GRACE_S = 60.0


def why_not() -> str | None:
    """Returns why such a run is impossible on this machine; None if it is possible."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("unshare", "ip", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian's util-linux and iproute2)"
    try:
        subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "none", "/run"], check=True, capture_output=True, timeout=20)
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses namespaces: {error.stderr.decode(errors='replace').strip()}"
    except subprocess.TimeoutExpired:
        return "the kernel does not answer when asked for namespaces"
    return None


def has_clocks() -> bool:
    """Returns whether a child can have a clock of its own."""
    command = ("unshare", "--time", "--monotonic", "1000", "--boottime", "1000", "true")
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


def start_isolated(arguments: Sequence[str]) -> int:
    """Runs `python -m bench.suites.soak` with these arguments in namespaces of its own. Returns its exit status.

    A Ctrl-C, or the end of this process, ends the run in order. What does not end is killed.
    """
    command = [*_UNSHARE, sys.executable, "-m", "bench.suites.soak", *arguments]
    child = spawn_child(command, death_signal=signal.SIGKILL, stdin=subprocess.PIPE, start_new_session=True)
    try:
        return child.wait()
    except BaseException:
        assert child.stdin is not None
        child.stdin.close()  # see `enter`
        end([child], _GRACE_S, ask=False)
        raise


def enter() -> None:
    """Makes the new namespaces fit for a run, and stops this process in order when the one that started it ends."""
    for folder in _COVERED:
        subprocess.run(("mount", "-t", "tmpfs", "pd-cache-soak", str(folder)), check=True, capture_output=True)
    subprocess.run(("ip", "link", "set", "lo", "up"), check=True, capture_output=True)

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_the_end, name="soak-parent", daemon=True).start()
