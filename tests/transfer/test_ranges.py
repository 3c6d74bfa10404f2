"""Reads of parts of objects: readers of one key share its session in Mooncake, and the last one ends it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.pool import Pool
from transfer.errors import Status
from transfer.ranges import ObjectRange, OpenReads, RangeRead
from transfer.staging import StagingPool
from transfer.store import MooncakeStore


class Client:
    """Mooncake's sessions: one a key, however often it was begun."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.begun: Counter[str] = Counter()
        self.during_begin: Callable[[], None] = lambda: None

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        self.during_begin()
        self.open.update(keys)
        self.begun.update(keys)
        return [0] * len(keys)

    def batch_get_session_end(self, keys: list[str]) -> int:
        assert self.open.issuperset(keys)
        self.open.difference_update(keys)
        return 0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_session_ends_with_its_last_reader() -> None:
    client = Client()
    reads = OpenReads(client)
    one, other = RangeRead(reads, ["a", "b"]), RangeRead(reads, ["b", "c"])
    one.begin()
    other.begin()
    one.close()
    assert reads.keys == client.open == {"b", "c"}
    one.close()
    other.close()
    assert reads.keys == client.open == set()


def test_a_call_that_is_late_keeps_the_session_of_a_reader_that_is_gone() -> None:
    client = Client()
    reads = OpenReads(client)
    read = RangeRead(reads, ["a"])
    read.begin()
    reads.retain(["a"])
    read.close()
    assert reads.keys == {"a"}
    reads.end(["a"])
    assert client.open == set()


def test_a_reader_that_is_closed_while_it_begins_leaves_no_session() -> None:
    client = Client()
    reads = OpenReads(client)
    read = RangeRead(reads, ["a"])
    client.during_begin = read.close
    read.begin()
    assert reads.keys == client.open == set()


def test_a_reader_that_was_closed_before_it_began_leaves_no_session() -> None:
    client = Client()
    reads = OpenReads(client)
    read = RangeRead(reads, ["a"])
    read.close()
    read.begin()
    assert reads.keys == client.open == set()


def test_leases_are_renewed_once_a_second_while_something_is_read() -> None:
    client, clock = Client(), Clock()
    read = RangeRead(OpenReads(client), ["a"], clock)
    read.renew_if_due()
    read.begin()
    for now, begun in ((100.5, 1), (101.0, 2), (101.9, 2), (102.1, 3)):
        clock.now = now
        read.renew_if_due()
        assert client.begun["a"] == begun, now
    read.close()
    clock.now = 200.0
    read.renew_if_due()
    assert client.begun["a"] == 3, "it is not read any more"


def test_many_readers_at_once_never_lose_a_session_that_they_need() -> None:
    client = Client()
    reads = OpenReads(client)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            keys = rng.sample("abcdef", 3)
            read = RangeRead(reads, keys)
            read.begin()
            wrong.extend(key for key in keys if key not in client.open)
            read.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert reads.keys == client.open == set()


SLOT = 1 << 16


@pytest.fixture
def store(pool: Pool) -> Iterator[MooncakeStore]:
    settings = pool.settings()
    one = MooncakeStore(settings.transfer, master=settings.master, segment_size=0)
    try:
        one.wait_open(60)
        yield one
    finally:
        one.close()


def test_ranges_of_several_objects_come_into_one_slot_each_to_its_place(store: MooncakeStore, pool: Pool) -> None:
    memory: StagingPool = store.staging(SLOT)
    values = {f"ranges/{number}": random.Random(number).randbytes(1000) for number in range(3)}
    with pool.bare_client() as client:
        for key, value in values.items():
            assert client.put(key, value) == 0
    keys = [*values, "ranges/none"]
    read, begun = store.start_ranges(keys, timeout=10)
    assert begun.results() == [*[Status.OK] * 3, Status.MISSING]
    slot = memory.try_lease()
    assert slot is not None
    wanted = [ObjectRange(100, 50, 0), ObjectRange(0, 1000, 2000), ObjectRange(990, 10, 60), ObjectRange(0, 1, 70)]
    results = store.start_get_range(read, keys, slot, wanted, timeout=10).results()
    assert [(one.status, one.size) for one in results[:3]] == [(Status.OK, one.size) for one in wanted[:3]]
    assert results[3].status is not Status.OK
    for one, value in zip(wanted, values.values(), strict=False):
        assert slot.view[one.place : one.place + one.size] == value[one.start : one.start + one.size]
    beyond = store.start_get_range(read, keys[:1], slot, [ObjectRange(995, 10, 0)], timeout=10).results()
    assert beyond[0].status is Status.INVALID
    with pytest.raises(ValueError, match="ranges that lie in a slot"):
        store.start_get_range(read, keys[:1], slot, [ObjectRange(0, 10, SLOT)], timeout=10)
    read.close()
    slot.release()
    memory.close()
