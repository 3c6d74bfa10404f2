"""A thread that spins without being in the way.

Mooncake waits for a transfer by spinning. A spinning thread of normal priority takes a core from the threads that do the
transfer (docs/mooncake.md, "It waits by spinning"). So a thread that waits runs under SCHED_DEADLINE, with a *budget*: the
kernel lets it run for `BUDGET_S` in each `PERIOD_S`, and puts it to sleep for the rest. It looks often enough, and leaves
nine tenths of a core to everybody else.

The budget is also a promise of the kernel's: however many others want the core, the thread gets it in each period. That is
what matters when it takes the GIL to return from the foreign call. A class that runs on leftovers (SCHED_IDLE, nice 19) starves
there where cores are busy, and the whole process stands still with it.

A thread whose call turns out long is called back by whoever waits for it, and nothing yields that would not be allowed to come
back.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BUDGET_S = 0.0001
PERIOD_S = 0.001

_SCHED_DEADLINE = 6
_RESET_ON_FORK = 1
"""A thread of this class may start others, which are ordinary ones: without the flag the kernel refuses to."""
_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
"""The number of the system call, for which the C library has no function."""


def _set_budget(thread: int) -> bool:
    """Whether the kernel took the thread under SCHED_DEADLINE."""
    if _SETATTR is None:
        return False
    budget, period = int(BUDGET_S * 1e9), int(PERIOD_S * 1e9)
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, _SCHED_DEADLINE, _RESET_ON_FORK, 0, 0, budget, period, period)
    return ctypes.CDLL(None).syscall(_SETATTR, thread, ctypes.c_char_p(attributes), 0) == 0


def _set_normal(thread: int) -> bool:
    try:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    except (OSError, AttributeError):  # refused, or not Linux
        return False
    return True


@functools.cache
def may_yield() -> bool:
    """Whether a thread can go under SCHED_DEADLINE and come back, which takes CAP_SYS_NICE and all of the machine's cores.

    Tried once, on a thread of its own.
    """
    came_back = [False]

    def try_it() -> None:
        me = threading.get_native_id()
        came_back[0] = _set_budget(me) and _set_normal(me)

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

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` on a tenth of a core."""
        if not self._wanted or not _set_budget(self._thread):
            return function()
        try:
            return function()
        finally:
            _set_normal(self._thread)

    def hurry(self) -> None:
        """Somebody has waited for long enough: stop yielding for the call under way."""
        if self._wanted:
            _set_normal(self._thread)
