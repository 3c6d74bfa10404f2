"""Threads and processes that outlive what started them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.pool import Pool
from tests.support.waiting import PATIENCE_S
from tests.support.warm_nodes import nursery


class _Processes:
    """The processes below this one. To find them, psutil reads a file of each process of the machine, which takes longer than most tests:
    it is asked only if there can be something new."""

    def __init__(self) -> None:
        self._children: set[int] = set()
        self._found: dict[int, psutil.Process] = {}

    def below(self) -> dict[int, psutil.Process]:
        """Returns all of them, by their numbers."""
        self._children = _children()
        found = psutil.Process().children(recursive=True) if self._children else []
        self._found = {process.pid: process for process in found if process.pid != nursery.pid}
        return self._found

    def known(self) -> dict[int, psutil.Process]:
        """The same, as they were found last if this process has had the same children since."""
        return self._found if _children() == self._children else self.below()


def _children() -> set[int]:
    """Returns the numbers of this process's own children."""
    tasks = Path("/proc/self/task")
    while (tasks / str(os.getpid()) / "children").exists():
        try:
            return {int(number) for task in tasks.iterdir() for number in (task / "children").read_text().split()}
        except OSError:
            continue  # a thread has ended, and its children are another's
    return {child.pid for child in psutil.Process().children()}  # a kernel without these files


_processes = _Processes()


@contextmanager
def no_leaks(shared: Callable[[], list[Pool]] = list) -> Iterator[None]:
    """AssertionError if a thread or child process of the block is still there a minute after it.

    `shared` pools may have nodes that were started anew in the block.
    """
    threads = set(threading.enumerate())
    children = set(_processes.known())
    yield
    end = time.monotonic() + PATIENCE_S
    while True:
        nodes = [node for pool in shared() for node in pool.nodes.values()]
        theirs = {node.process.pid for node in nodes}
        known = threads.union(*(node.readers for node in nodes))
        new_threads = [thread for thread in threading.enumerate() if thread not in known]
        new_children = [
            child
            for pid, child in _processes.below().items()
            if pid not in children | theirs and child.ppid() not in theirs
        ]
        if not new_threads and not new_children:
            return
        assert time.monotonic() < end, f"left behind: threads {new_threads}, processes {new_children}"
        time.sleep(0.02)
