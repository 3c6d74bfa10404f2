"""Requests to stop, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from launch.supervise import stop_on_signals
from tests.support.pool import ROOT
from tests.support.waiting import PATIENCE_S


def test_stop_on_signals_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(PATIENCE_S)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_does_not_end_the_wait_of_the_main_thread_is_noticed_all_the_same() -> None:
    """As when it comes just before the wait begins: Python's handler runs only after the wait."""
    code = (
        "import signal, threading\n"
        "from launch.supervise import stop_on_signals\n"
        "def elsewhere(): signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "with stop_on_signals() as stop:\n"
        "    threading.Timer(0.1, elsewhere).start()\n"
        "    assert stop.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S, check=True)
