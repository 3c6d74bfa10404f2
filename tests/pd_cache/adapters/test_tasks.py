"""Tasks of a peer: every one ends, is announced, and is reported once."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from pd_cache.adapters.tasks import MOST_QUEUED, TaskLane
from pd_cache.objects.cache import Deadline
from tests.support.waiting import wait_for


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def lane(complaints: list[str]) -> Iterator[TaskLane[str]]:
    lane: TaskLane[str] = TaskLane("a-lane", 1, complaints.append)
    try:
        yield lane
    finally:
        lane.close(60)
        lane.close(60)


def is_announced(lane: TaskLane[str]) -> bool:
    return bool(select.select([lane.event], [], [], 60)[0])


def test_a_result_is_announced_and_reported_once(lane: TaskLane[str]) -> None:
    number = lane.submit(lambda _: "done", "failed", 60)
    assert is_announced(lane)
    assert os.eventfd_read(lane.event) == 1
    assert lane.take(number) == "done"
    assert lane.take(number) is None
    assert lane.take(12345) is None


def test_all_results_together(lane: TaskLane[str]) -> None:
    numbers = [lane.submit(lambda _, n=n: f"{n}", "failed", 60) for n in range(5)]
    found: dict[int, str] = {}
    wait_for(lambda: found.update(lane.take_all()) or len(found) == 5)
    assert found == {number: f"{n}" for n, number in enumerate(numbers)}


def test_a_task_that_raises_has_failed_and_the_next_runs(lane: TaskLane[str], complaints: list[str]) -> None:
    def raises(_: Deadline) -> str:
        raise RuntimeError("of the test")

    number, then = lane.submit(raises, "failed", 60), lane.submit(lambda _: "done", "failed", 60)
    found: dict[int, str] = {}
    wait_for(lambda: found.update(lane.take_all()) or len(found) == 2)
    assert found == {number: "failed", then: "done"}
    assert complaints == ["a-lane: 1 tasks failed: RuntimeError('of the test')"]


def test_one_task_too_many_ends_at_once_as_failed(lane: TaskLane[str]) -> None:
    go = threading.Event()

    def waits(_: Deadline) -> str:
        go.wait(60)
        return "done"

    numbers = [lane.submit(waits, "failed", 60) for _ in range(MOST_QUEUED + 10)]
    assert is_announced(lane)
    refused = lane.take_all()
    assert set(refused.values()) == {"failed"}
    assert len(refused) >= 9
    go.set()
    found = dict(refused)
    wait_for(lambda: found.update(lane.take_all()) or len(found) == len(numbers), what="every task has a result")


def test_tasks_that_wait_when_it_is_closed_still_end(complaints: list[str]) -> None:
    lane: TaskLane[str] = TaskLane("a-lane", 1, complaints.append)
    numbers = [lane.submit(lambda _: "done", "failed", 60) for _ in range(20)]
    lane.close(60)
    late = lane.submit(lambda _: "done", "failed", 60)
    assert set(lane.take_all()) == {*numbers, late}


def test_close_makes_the_deadline_of_a_task_that_runs_pass(complaints: list[str]) -> None:
    lane: TaskLane[str] = TaskLane("a-lane", 1, complaints.append)
    running = threading.Event()

    def runs(deadline: Deadline) -> str:
        running.set()
        wait_for(lambda: deadline.passed, what="the end of the task's time")
        return "ended"

    number = lane.submit(runs, "failed", 3600)
    assert running.wait(60)
    lane.close(60)
    assert lane.take(number) == "ended"


def test_a_task_whose_time_passes_while_it_waits_has_failed(lane: TaskLane[str]) -> None:
    go = threading.Event()
    first = lane.submit(lambda _: str(go.wait(60)), "failed", 60)
    second = lane.submit(lambda _: "done", "failed", 0.0)
    go.set()
    found: dict[int, str] = {}
    wait_for(lambda: found.update(lane.take_all()) or len(found) == 2)
    assert found == {first: "True", second: "failed"}
