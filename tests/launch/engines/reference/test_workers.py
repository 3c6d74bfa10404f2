"""A bounded number of calls, none of which can hold up closing."""

from __future__ import annotations

import threading

import pytest

from launch.engines.reference.scheduler import Workers


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def test_one_call_more_than_may_run_and_wait_is_refused(gate):
    workers = Workers("pd-cache-test", threads=2, backlog=1)
    assert [workers.try_submit(lambda: gate.wait(60) and None) for _ in range(4)] == [True, True, True, False]
    gate.set()
    assert workers.close(10)


def test_a_call_that_raises_neither_ends_its_thread_nor_stays_counted(caplog):
    workers = Workers("pd-cache-test", threads=1)
    for _ in range(3):
        failed = threading.Event()

        def call(failed=failed):
            failed.set()
            raise RuntimeError("on purpose")

        while not workers.try_submit(call):
            pass
        assert failed.wait(60)
    assert workers.close(10)
    assert "on purpose" in caplog.text


def test_closing_waits_for_calls_but_not_for_ever(gate):
    workers = Workers("pd-cache-test", threads=1)
    assert workers.try_submit(lambda: gate.wait(60) and None)
    assert not workers.close(0.05)
    assert not workers.try_submit(lambda: None)
    gate.set()
    assert workers.close(10)
