"""Requests to stop, at any moment."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from launch.signals import StoppedError, signals_as_exceptions, stop_on_signals, stop_signals
from tests.support.pool import ROOT
from tests.support.waiting import PATIENCE_S


def test_stop_on_signals_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop.wait(0.01)
        for _ in range(100_000):  # more than the pipe holds
            stop.set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(PATIENCE_S)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_does_not_end_the_wait_of_the_main_thread_is_noticed_all_the_same() -> None:
    """As when it comes just before the wait begins: Python's handler runs only after the wait."""
    code = (
        "import signal, threading\n"
        "from launch.signals import stop_on_signals\n"
        "def elsewhere(): signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "with stop_on_signals() as stop:\n"
        "    threading.Timer(0.1, elsewhere).start()\n"
        "    assert stop.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S, check=True)


def test_a_flag_waits_also_in_a_process_that_has_more_than_1024_files_open() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import os, resource\n"
        "from launch.signals import StopFlag\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (1200, {most}))\n"
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]\n"
        "flag = StopFlag()\n"
        "assert not flag.wait(0.01)\n"
        "flag.set()\n"
        "assert flag.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S, check=True)


@pytest.mark.parametrize("number", stop_signals())
@pytest.mark.parametrize("at", range(2 * len(stop_signals())))
@pytest.mark.parametrize("block", [signals_as_exceptions, stop_on_signals])
def test_a_signal_while_handlers_are_exchanged_is_dealt_with_once_and_leaves_all_handlers_as_they_were(
    block: Callable[[], AbstractContextManager[Any]], at: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`at`: before which of the calls that exchange a handler it comes. The earlier handlers raise, as Python's own for SIGINT does."""
    exchange: Callable[[int, Any], Any] = signal.signal
    before = {each: exchange(each, signal.default_int_handler) for each in stop_signals()}
    calls = iter(range(100))

    def exchange_and_signal(each: int, handler: Any) -> Any:
        if next(calls) == at:
            signal.raise_signal(number)
        return exchange(each, handler)

    monkeypatch.setattr(signal, "signal", exchange_and_signal)
    came = 0
    try:
        with block() as stop:
            came += stop is not None and stop.is_set()
    except (StoppedError, KeyboardInterrupt):
        came += 1
    finally:
        monkeypatch.undo()
        after = [exchange(each, handler) for each, handler in before.items()]
    assert after == [signal.default_int_handler] * len(before)
    assert came == 1
