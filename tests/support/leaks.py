"""Threads and processes that outlive what started them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from tests.support.pool import Pool
from tests.support.waiting import PATIENCE_S


@contextmanager
def no_leaks(shared: Callable[[], list[Pool]] = list) -> Iterator[None]:
    """AssertionError if a thread or child process of the block is still there a minute after it.

    `shared` pools may have nodes that were started anew in the block.
    """
    threads = set(threading.enumerate())
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    end = time.monotonic() + PATIENCE_S
    while True:
        nodes = [node for pool in shared() for node in pool.nodes.values()]
        theirs = {node.process.pid for node in nodes}
        known = threads.union(*(node.readers for node in nodes))
        new_threads = [thread for thread in threading.enumerate() if thread not in known]
        new_children = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid not in children | theirs and child.ppid() not in theirs
        ]
        if not new_threads and not new_children:
            return
        assert time.monotonic() < end, f"left behind: threads {new_threads}, processes {new_children}"
        time.sleep(0.02)
