"""Whose turn it is: a pure matter."""

from __future__ import annotations

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pd_cache.server.queueing import FairQueue, Item, Lane
from tests.support.waiting import wait_for

BOTH = (Lane.QUICK, Lane.BULK)


def item(client: str, cost: int = 1, lane: Lane = Lane.BULK, work: int = 0) -> Item[int]:
    return Item(client, lane, cost, work)


def drain(queue: FairQueue[int], count: int) -> list[Item[int]]:
    taken = []
    for _ in range(count):
        one = queue.take(BOTH)
        assert one is not None
        queue.finished(one)
        taken.append(one)
    return taken


def test_a_client_with_many_requests_does_not_keep_others_waiting() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for _ in range(10):
        queue.put(item("greedy"))
    queue.put(item("modest"))
    assert "modest" in [one.client for one in drain(queue, 2)]


def test_turns_are_fair_by_work_not_by_number() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for _ in range(10):
        queue.put(item("large", 10))
        queue.put(item("small", 1))
    served = Counter(one.client for one in drain(queue, 11))
    assert served["small"] == 10


def test_nobody_saves_up_by_being_idle() -> None:
    queue: FairQueue[int] = FairQueue(100)
    for _ in range(10):
        queue.put(item("busy", 5))
    drain(queue, 6)
    for _ in range(4):
        queue.put(item("late", 5))
    assert Counter(one.client for one in drain(queue, 4)) == {"busy": 2, "late": 2}


def test_questions_go_before_transfers() -> None:
    queue: FairQueue[int] = FairQueue(100)
    queue.put(item("a"))
    queue.put(item("b", lane=Lane.QUICK))
    assert [one.lane for one in drain(queue, 2)] == [Lane.QUICK, Lane.BULK]


def test_one_client_gets_half_of_the_places_and_leaves_the_others_some() -> None:
    queue: FairQueue[int] = FairQueue(16)
    assert sum(queue.put(item("greedy")) is None for _ in range(20)) == 8
    assert sum(queue.put(item("modest")) is None for _ in range(20)) == 4
    assert queue.put(item("third")) is None


def test_a_client_that_is_gone_leaves_its_places() -> None:
    queue: FairQueue[int] = FairQueue(4)
    queue.put(item("gone"))
    running = queue.take(BOTH)
    assert running is not None
    queue.put(item("gone"))
    assert len(queue.discard("gone")) == 1
    assert queue.discard("gone") == queue.discard("never there") == []
    queue.finished(running)
    assert queue.in_flight == 0


def test_a_client_that_holds_less_takes_a_place_from_the_one_that_holds_most() -> None:
    queue: FairQueue[int] = FairQueue(8)
    for name, count in {"a": 4, "b": 2, "c": 1, "d": 1}.items():
        for index in range(count):
            assert queue.put(item(name, work=index)) is None
    assert queue.put(item("late")) == item("a", work=3), "the last one of the client that holds most"
    assert queue.put(item("later")) == item("a", work=2)
    assert queue.put(item("a")) == item("a"), "who holds as much as the others displaces nobody"
    assert queue.in_flight == 8
    drain(queue, 8)
    assert queue.in_flight == 0


def test_what_is_late_leaves_its_place_without_a_thread() -> None:
    queue: FairQueue[int] = FairQueue(8)
    late = item("a", work=1)._replace(until=5.0)
    for one in (late, item("a", work=2), item("b", work=3)._replace(until=9.0)):
        assert queue.put(one) is None
    assert queue.expire(4.9) == []
    assert queue.expire(5.0) == [late]
    assert queue.in_flight == 2
    assert sorted(one.work for one in drain(queue, 2)) == [2, 3]


def test_an_item_that_takes_many_turns_lets_others_in_between() -> None:
    queue: FairQueue[int] = FairQueue(8)
    queue.put(item("long", 10))
    taken: list[str] = []
    for turn in range(6):
        one = queue.take(BOTH)
        assert one is not None
        taken.append(one.client)
        if one.client == "long":
            assert queue.put_back(one)
        else:
            queue.finished(one)
        if turn == 0:
            for _ in range(3):
                queue.put(item("short", 1))
            queue.put(item("long", 10, work=1))
    assert taken == ["long", "long", "short", "short", "short", "long"]
    assert queue.in_flight == 2
    assert queue.close()[0].work == 0, "what is left of an item comes before all else of its client"
    assert not queue.put_back(item("long"))


def test_closing_wakes_who_waits() -> None:
    queue: FairQueue[int] = FairQueue(4)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(queue.take(BOTH))) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.close()
    wait_for(lambda: results == [None] * 3)
    assert queue.put(item("a")) is not None
    for thread in threads:
        thread.join()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from(BOTH)), max_size=60))
def test_each_item_comes_out_once_and_in_order_within_its_client_and_lane(asked: list[tuple[str, int, Lane]]) -> None:
    queue: FairQueue[int] = FairQueue(40)
    accepted: list[Item[int]] = []
    for index, (client, cost, lane) in enumerate(asked):
        new = Item(client, lane, cost, index)
        accepted.append(new)
        if (turned_away := queue.put(new)) is not None:
            accepted.remove(turned_away)
    taken = drain(queue, len(accepted))
    assert sorted(one.work for one in taken) == [one.work for one in accepted]
    for client in "abc":
        for lane in Lane:
            order = [one.work for one in taken if (one.client, one.lane) == (client, lane)]
            assert order == sorted(order)
    assert queue.in_flight == 0
    assert not queue._clients


def test_an_item_wakes_who_takes_from_its_lane_and_nobody_else() -> None:
    queue: FairQueue[int] = FairQueue(100)
    taken: list[tuple[str, int]] = []

    def take(name: str, lanes: tuple[Lane, ...]) -> None:
        while (one := queue.take(lanes)) is not None:
            taken.append((name, one.work))
            queue.finished(one)

    threads = [
        threading.Thread(target=take, args=arguments)
        for arguments in (("questions", (Lane.QUICK,)), ("bytes", (Lane.BULK,)), ("bytes", (Lane.BULK,)))
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(200):
            assert queue.put(item("a", lane=Lane.QUICK if number % 3 else Lane.BULK, work=number)) is None
            wait_for(lambda number=number: len(taken) == number + 1)  # type: ignore[misc]
        assert taken == [("questions" if number % 3 else "bytes", number) for number in range(200)]
    finally:
        queue.close()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_many_threads_take_everything_that_is_put_at_once() -> None:
    queue: FairQueue[int] = FairQueue(10_000)
    taken: list[int] = []

    def take() -> None:
        while (one := queue.take(BOTH)) is not None:
            taken.append(one.work)
            queue.finished(one)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(2000):
            assert queue.put(item("a", lane=Lane(number % 2), work=number)) is None
        wait_for(lambda: len(taken) == 2000 and not queue.in_flight)
        assert sorted(taken) == list(range(2000))
    finally:
        queue.close()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
