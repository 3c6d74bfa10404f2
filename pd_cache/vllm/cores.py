"""On which processor cores the cache's threads run.

vLLM's worker on CPUs binds each thread that computes to a core of its own, and its main thread to the first of these cores. A thread
inherits the cores of the thread that starts it. So all threads of Mooncake and of the cache, some eighty, would share one core with a
thread that computes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Lets the threads that are started in the `with` block run on every core on which some thread of this process may run now."""
    before = os.sched_getaffinity(0)
    cores = set(before)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cores |= os.sched_getaffinity(int(thread))
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
