"""Waiting for conditions, with a deadline; threads that a test waits for; and a clock that does not wait."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

PATIENCE_S = 60.0
"""What one answer may take. No test measures with it: a machine that is busy with other things may be
slow."""


class Clock:
    """Stands still until a test sets `now`."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def wait_for(condition, what="the condition"):
    """Returns what `condition()` is as soon as it is true; AssertionError if it is not for five minutes."""
    begin = asked = time.monotonic()
    while not (found := condition()):
        now = time.monotonic()
        assert now < begin + 5 * PATIENCE_S, f"not within {5 * PATIENCE_S:g} s: {what}"
        # a question that servers have to work for must not keep them from what is waited for; what takes long
        # is asked for less often
        time.sleep(max(0.01, min(9 * (now - asked), 1), min((now - begin) / 20, 0.25)))
        asked = time.monotonic()
    return found


@contextmanager
def beside(*calls):
    """While the block runs, each call runs on a thread of its own. The end waits for all of them, and raises
    what one has raised."""
    with ThreadPoolExecutor(len(calls)) as threads:
        begun = [threads.submit(call) for call in calls]
        yield
        for one in begun:
            one.result(5 * PATIENCE_S)


def together(*calls):
    """Runs calls at the same time, each on a thread of its own."""
    with beside(*calls):
        pass
