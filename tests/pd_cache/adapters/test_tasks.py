"""Tasks of a peer: every one ends, is announced, and is reported once."""

import os
import select
import threading

import pytest

from pd_cache.adapters.tasks import MOST_QUEUED, TaskLane
from tests.support.waiting import wait_for


@pytest.fixture
def lane():
    lane = TaskLane("a-lane", 1)
    yield lane
    assert lane.close(60)
    assert lane.close(60)


def results(lane, count):
    found = {}
    wait_for(lambda: found.update(lane.take_all()) or len(found) == count, "every task has a result")
    return found


def is_announced(lane):
    return bool(select.select([lane.event], [], [], 60)[0])


def test_a_result_is_announced_and_reported_once(lane):
    number = lane.submit(lambda _: "done", "failed", 60)
    assert is_announced(lane)
    assert os.eventfd_read(lane.event) == 1
    assert lane.take(number) == "done"
    assert lane.take(number) is None
    assert lane.take(12345) is None


def test_a_task_that_raises_has_failed_and_the_next_runs(lane, caplog):
    def raises(_):
        raise RuntimeError("of the test")

    number, then = lane.submit(raises, "failed", 60), lane.submit(lambda _: "done", "failed", 60)
    assert results(lane, 2) == {number: "failed", then: "done"}
    assert caplog.messages == ["a-lane: 1 tasks failed: RuntimeError('of the test')"]


def test_one_task_too_many_ends_at_once_as_failed(lane):
    go = threading.Event()
    for _ in range(MOST_QUEUED + 10):
        lane.submit(lambda _: str(go.wait(60)), "failed", 60)
    assert is_announced(lane)
    refused = lane.take_all()
    assert set(refused.values()) == {"failed"}
    assert len(refused) >= 9
    go.set()
    results(lane, MOST_QUEUED + 10 - len(refused))


@pytest.mark.parametrize("end", [TaskLane.close, TaskLane.drain], ids=["close", "drain"])
def test_the_end_of_a_lane_makes_the_deadlines_of_its_tasks_pass_and_waits_for_them(end, lane):
    running = threading.Event()

    def runs(deadline):
        running.set()
        wait_for(lambda: deadline.passed, "the end of the task's time")
        return "ended"

    numbers = [lane.submit(runs, "failed", 3600) for _ in range(20)]
    assert running.wait(60)
    assert end(lane, 60)
    late = lane.submit(lambda deadline: "ended" if deadline.passed else "done", "refused", 60)
    found = results(lane, 21)
    assert found == dict.fromkeys(numbers, "ended") | {late: "refused" if end is TaskLane.close else "done"}


def test_a_task_whose_time_passes_while_it_waits_has_failed(lane):
    go = threading.Event()
    first = lane.submit(lambda _: str(go.wait(60)), "failed", 60)
    second = lane.submit(lambda _: "done", "failed", 0.0)
    go.set()
    assert results(lane, 2) == {first: "True", second: "failed"}
