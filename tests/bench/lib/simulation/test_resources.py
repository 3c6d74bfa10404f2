"""Simulated time, and what is shared in it, against answers known by arithmetic."""

from __future__ import annotations

import random

import pytest

from bench.lib.simulation.clock import Process, SimulatedTime, all_of, first_of
from bench.lib.simulation.resources import Gate, SerialThread, SharedCapacity


def ends(time: SimulatedTime, *jobs: tuple[float, float], **capacity: float) -> list[float]:
    """When each job ends, given when it begins and how much work it is."""
    shared = SharedCapacity(time, capacity.pop("capacity", 1.0), capacity.pop("most", 1.0), **capacity)
    ended = [0.0] * len(jobs)

    def one(index: int, begins: float, work: float) -> Process:
        yield time.after(begins)
        yield shared.begin(work)
        ended[index] = time.now

    for index, (begins, work) in enumerate(jobs):
        time.start(one(index, begins, work))
    time.run()
    return ended


def test_one_job_takes_its_work() -> None:
    assert ends(SimulatedTime(), (1.0, 2.5)) == [3.5]


def test_jobs_on_one_core_share_it_fairly() -> None:
    # until 2 the first alone, 2 done; then both at half speed: the second needs 2 s, and the first has 1 left of its 4
    assert ends(SimulatedTime(), (0.0, 4.0), (2.0, 1.0)) == [5.0, 4.0]


def test_a_job_uses_no_more_than_one_core_of_several() -> None:
    assert ends(SimulatedTime(), (0.0, 3.0), (0.0, 3.0), capacity=4.0) == [3.0, 3.0]
    assert ends(SimulatedTime(), *[(0.0, 3.0)] * 4, capacity=2.0) == [6.0] * 4


def test_other_programs_take_their_share() -> None:
    assert ends(SimulatedTime(), (0.0, 1.0), others=1.0) == [2.0]
    assert ends(SimulatedTime(), (0.0, 1.0), others=3.0, capacity=2.0) == [2.0]


def test_many_threads_of_one_process_take_no_more_from_another_process_than_one_does() -> None:
    time, ended = SimulatedTime(), {}
    shared = SharedCapacity(time, 1.0, 1.0)
    for name, group in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b", "b")):
        shared.begin(1.0, group).then(lambda _, name=name: ended.update({name: time.now}))  # type: ignore[misc]
    time.run()
    # b gets half, until it is done after 2 s; a's share the other half, and then everything
    assert ended == pytest.approx({"b": 2.0, "a1": 4.0, "a2": 4.0, "a3": 4.0})


def test_what_one_process_cannot_use_goes_to_the_others() -> None:
    time, ended = SimulatedTime(), {}
    shared = SharedCapacity(time, 3.0, 1.0)
    for name, group in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b", "b")):
        shared.begin(2.0, group).then(lambda _, name=name: ended.update({name: time.now}))  # type: ignore[misc]
    time.run()
    # b can use one core; a's three threads get the other two until b is done, and then a core each
    assert ended == pytest.approx({"b": 2.0, "a1": 2.0 + 2.0 / 3, "a2": 2.0 + 2.0 / 3, "a3": 2.0 + 2.0 / 3})


def test_other_programs_come_and_go() -> None:
    time = SimulatedTime()
    shared = SharedCapacity(time, 1.0, 1.0)
    job = shared.begin(2.0)
    time.call_at(1.0, lambda: shared.let_others(1.0))
    time.call_at(2.0, lambda: shared.let_others(0.0))
    ended: list[float] = []
    job.then(lambda _: ended.append(time.now))
    time.run()
    shared.settle()
    assert ended == [2.5]
    assert shared.taken_by_others == pytest.approx(0.5)


def test_cores_that_share_caches_are_slower_together() -> None:
    assert ends(SimulatedTime(), (0.0, 1.0), capacity=2.0, crowded=1.5) == [1.0]
    assert ends(SimulatedTime(), (0.0, 1.0), (0.0, 1.0), capacity=2.0, crowded=1.5) == [1.5, 1.5]


def test_what_is_done_is_what_was_asked_for_and_no_more_than_the_capacity() -> None:
    rng, time = random.Random(7), SimulatedTime()
    shared = SharedCapacity(time, 3.0, 1.0)
    works = [rng.expovariate(1.0) for _ in range(300)]
    begun = 0

    def one(work: float) -> Process:
        nonlocal begun
        yield time.after(rng.uniform(0, 60))
        begun += 1
        yield shared.begin(work)

    for work in works:
        time.start(one(work))
    time.run()
    shared.settle()
    assert begun == 300
    assert shared.asked == pytest.approx(sum(works))
    assert shared.done == pytest.approx(sum(works))
    assert shared.done <= 3.0 * time.now


def test_a_job_that_is_cut_ends_earlier_and_never_before_what_is_done() -> None:
    time = SimulatedTime()
    shared = SharedCapacity(time, 1.0, 1.0)
    ended = []

    def one() -> Process:
        job = shared.begin(10.0)
        time.call_at(2.0, lambda: shared.cut(job, 3.0))
        yield job
        ended.append(time.now)
        job = shared.begin(10.0)
        time.call_at(5.0, lambda: shared.cut(job, 0.5))
        yield job
        ended.append(time.now)

    time.start(one())
    time.run()
    shared.settle()
    assert ended == [3.0, 5.0]
    assert shared.asked == pytest.approx(shared.done) == pytest.approx(5.0)


def test_a_thread_does_one_thing_after_the_other() -> None:
    time = SimulatedTime()
    thread = SerialThread(SharedCapacity(time, 4.0, 1.0))
    ended: list[float] = []
    for work in (2.0, 1.0, 1.0):
        thread.run(work).then(lambda _: ended.append(time.now))
    time.run()
    assert ended == [2.0, 3.0, 4.0]


def test_a_gate_lets_in_as_many_as_it_has_places_in_order() -> None:
    time, gate, entered = SimulatedTime(), Gate(2), []

    def one(name: str) -> Process:
        yield gate.take()
        entered.append((name, time.now))
        yield time.after(1.0)
        gate.give()

    for name in "abc":
        time.start(one(name))
    time.run()
    assert entered == [("a", 0.0), ("b", 0.0), ("c", 1.0)]
    assert gate.free == 2


def test_waiting_for_the_first_and_for_all() -> None:
    time, seen = SimulatedTime(), []

    def one() -> Process:
        yield first_of(time.after(1.0), time.after(3.0))
        seen.append(time.now)
        yield all_of([time.after(1.0), time.after(3.0)])
        seen.append(time.now)
        yield all_of([])
        seen.append(time.now)

    time.start(one())
    time.run()
    assert seen == [1.0, 4.0, 4.0]


@pytest.mark.parametrize("utilization", [0.3, 0.7])
def test_one_server_with_random_arrivals_agrees_with_the_closed_form(utilization: float) -> None:
    """A queue with Poisson arrivals and work of one size (M/D/1): the mean wait is rho / (2 (1 - rho)) of the work."""
    rng, time = random.Random(3), SimulatedTime()
    thread = SerialThread(SharedCapacity(time, 1.0, 1.0))
    waits: list[float] = []

    def client() -> Process:
        for _ in range(40_000):
            yield time.after(rng.expovariate(utilization))
            arrived = time.now
            thread.run(1.0).then(lambda _, arrived=arrived: waits.append(time.now - arrived - 1.0))  # type: ignore[misc]

    time.start(client())
    time.run()
    assert len(waits) == 40_000
    assert sum(waits) / len(waits) == pytest.approx(utilization / (2 * (1 - utilization)), rel=0.08)
