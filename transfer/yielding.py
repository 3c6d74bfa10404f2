"""A thread that spins without being in the way.

Mooncake waits for a transfer by spinning. A spinning thread of normal priority takes a core from the threads that do the
transfer, and even at the lowest priority it hides from the scheduler that the core is free for them. SCHED_IDLE does not:
on two cores it is worth a fifth of the throughput (measured; docs/mooncake.md).

A thread of that class starves on a machine whose cores are all busy, and if it is descheduled while it holds the GIL it takes
the process with it. So only the foreign call runs that way; a thread that got next to nothing while it yielded does not
yield again for a while; who waits too long calls it back; and nobody yields who would not be allowed to come back.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FULL = 0.02
"""Share of a core below which a spinning thread was starved."""
_WORTH_JUDGING_S = 0.1
_ABSTAIN_S = 10.0


def _set_policy(thread: int, policy: int) -> bool:
    try:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    except (OSError, AttributeError):  # refused, or not Linux
        return False
    return True


@functools.cache
def may_yield() -> bool:
    """Whether a thread can go to SCHED_IDLE and come back, which takes CAP_SYS_NICE. Tried once, on a thread of its own."""
    came_back = [False]

    def try_it() -> None:
        me = threading.get_native_id()
        came_back[0] = _set_policy(me, os.SCHED_IDLE) and _set_policy(me, os.SCHED_OTHER)

    trial = threading.Thread(target=try_it, name="mooncake-yield-trial")
    trial.start()
    trial.join()
    return came_back[0]


class Yielding:
    """One thread's priority. `run` is for that thread, `hurry` for any other."""

    def __init__(self, wanted: bool) -> None:
        """For the calling thread."""
        self._thread = threading.get_native_id()
        self._wanted = wanted and may_yield()
        self._abstain_until = 0.0

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` on what nobody else wants of the processor."""
        if not self._wanted or time.monotonic() < self._abstain_until:
            return function()
        start, used = time.monotonic(), time.thread_time()
        _set_policy(self._thread, os.SCHED_IDLE)
        try:
            return function()
        finally:
            _set_policy(self._thread, os.SCHED_OTHER)
            elapsed = time.monotonic() - start
            if elapsed > _WORTH_JUDGING_S and time.thread_time() - used < _FULL * elapsed:
                self._abstain_until = start + elapsed + _ABSTAIN_S

    def hurry(self) -> None:
        """Somebody has waited for long enough: stop yielding for the call under way."""
        if self._wanted:
            _set_policy(self._thread, os.SCHED_OTHER)
