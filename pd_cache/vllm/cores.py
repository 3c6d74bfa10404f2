"""On which processor cores the cache's threads run.

vLLM's worker on CPUs binds each thread that computes to a core of its own, and its main thread to the first of these cores. A thread
inherits the cores of the thread that starts it. So all threads of Mooncake and of the cache, some eighty, would share one core with a
thread that computes. They get the cores of the engine's core process instead, which no binding has touched: those that whoever started vLLM
gave to it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator


def engine_cores() -> set[int]:
    """Returns the cores on which some thread of this process may run now, and those of the process that started it as its worker."""
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cores |= os.sched_getaffinity(int(thread))
    # a worker is started by the engine's core process, and that by vLLM's front end; both in Python's way
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            cores |= os.sched_getaffinity(parent.pid)
    return cores


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Lets the threads that are started in the `with` block run on every core of the engine. Afterwards the calling thread has its own
    cores again."""
    before = os.sched_getaffinity(0)
    # a core may be forbidden to this process by now: a thread that is confined is better than none
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before | engine_cores())
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
