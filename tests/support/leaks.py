"""Threads and processes that outlive what started them."""

import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.waiting import PATIENCE_S
from tests.support.warm_nodes import nursery


def _children():
    """Returns the numbers of this process's own children. psutil reads a file of each process of the machine,
    which takes longer than most tests."""
    tasks = Path("/proc/self/task")
    while (tasks / str(os.getpid()) / "children").exists():
        try:
            return {
                int(number) for task in tasks.iterdir() for number in (task / "children").read_text().split()
            }
        except OSError:
            continue  # a thread has ended, and its children are another's
    return {child.pid for child in psutil.Process().children()}  # a kernel without these files


def alive(pid):
    """Whether there is such a process, and it has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def open_files(kind):
    """How many open files of this process have this in their name."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found += kind in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


@contextmanager
def no_leaks(shared=list):
    """AssertionError if a thread or a child of this process that the block started is still there a minute
    after it.

    `shared` pools may have nodes that were started anew in the block.
    """
    threads = set(threading.enumerate())
    children = _children()
    yield
    end = time.monotonic() + PATIENCE_S
    while True:
        nodes = [node for pool in shared() for node in pool.nodes.values()]
        known = threads.union(*(node.readers for node in nodes))
        new_threads = [thread for thread in threading.enumerate() if thread not in known]
        new_children = _children() - children - {nursery.pid, *(node.process.pid for node in nodes)}
        if not new_threads and not new_children:
            return
        processes = [psutil.Process(pid) for pid in new_children if psutil.pid_exists(pid)]
        assert time.monotonic() < end, f"left behind: threads {new_threads}, processes {processes}"
        time.sleep(0.02)
