"""Locks that a user's Ctrl-C cannot leave taken."""

from __future__ import annotations

import random
import signal
import threading

from transfer.locks import Condition

INTERRUPTS = 2000


def test_an_interrupt_never_leaves_a_condition_locked() -> None:
    condition, rng = Condition(), random.Random(1)
    armed, interrupts = False, 0

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    usually = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < INTERRUPTS:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1e-4))
                while True:
                    with condition:
                        condition.notify_all()
            except KeyboardInterrupt:
                armed = False
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usually)
    got: list[bool] = []
    other = threading.Thread(target=lambda: got.append(condition.acquire(timeout=5)))
    other.start()
    other.join()
    assert got == [True]


def test_a_thread_waits_at_it_until_it_is_notified() -> None:
    condition, said = Condition(), []
    with condition:
        waiter = threading.Thread(target=lambda: _say(condition, said))
        waiter.start()
        assert condition.wait_for(lambda: said, 60)
    waiter.join()


def _say(condition: Condition, said: list[str]) -> None:
    with condition:
        said.append("here")
        condition.notify()
