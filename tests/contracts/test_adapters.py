"""What every adapter does alike, the plain client included: under real pools, with real outages and real
damage."""

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.adapters import ALIKE, KINDS, PAGE, end_subject, impatient
from tests.support.waiting import wait_for


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return str(request.param)


@pytest.fixture(params=[kind for kind in KINDS if kind not in ALIKE])
def lone_kind(request):
    return str(request.param)


@pytest.fixture
def namespace():
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def pair_of_module(pool, kind):
    space, subjects = uuid.uuid4().hex, []
    try:
        for _ in range(2):
            subjects.append(KINDS[kind](pool.settings(), space))
            subjects[-1].wait_available()
        yield subjects
    finally:
        for subject in subjects:
            end_subject(subject)


@pytest.fixture
def pair(pair_of_module, monkeypatch):
    """Two adapters of one kind, in one namespace, that live longer than the test, which has names of its own
    in them."""
    monkeypatch.setitem(PREFIX, "of the test", uuid.uuid4().hex)
    return pair_of_module


PREFIX = {"of the test": ""}


@pytest.fixture
def make(lone_kind, namespace):
    """Makes adapters of one kind, in one namespace; all are closed after the test."""
    subjects = []

    def make_one(pool, *, patient=True, wait=True):
        settings = pool.settings()
        subjects.append(KINDS[lone_kind](settings if patient else impatient(settings), namespace))
        if wait:
            subjects[-1].wait_available()
        return subjects[-1]

    try:
        yield make_one
    finally:
        for subject in subjects:
            end_subject(subject)


def value(n):
    return random.Random(str(n)).randbytes(PAGE)


def values(*numbers):
    return {f"{PREFIX['of the test']} value {n}": value(n) for n in numbers}


def damage(pool, before, change):
    """Damages every object that was stored since `before`."""
    with pool.bare_client() as client:
        changed = 0
        for key in pool.keys() - before:
            if good := client.get(key):
                assert client.upsert(key, change(good)) == 0
                changed += 1
    assert changed, "something was stored"


def flip(at):
    """One bit, at this part of the object."""

    def flipped(good):
        raw = bytearray(good)
        raw[int(at * (len(raw) - 1))] ^= 0x10
        return bytes(raw)

    return flipped


def test_what_one_instance_stored_another_finds_and_loads_with_holes(pair):
    one, other = pair
    stored, names = values(0, 2, 5, 7, 8), list(values(*range(9)))
    assert one.store(stored) == [True] * 5
    assert other.store(values(2, 5)) == [True] * 2, "they are there already"
    assert other.has(names) == [name in stored for name in names]
    assert other.load(names) == [stored.get(name) for name in names]
    assert (one.store({}), one.has([]), one.load([])) == ([], [], [])


@pytest.mark.parametrize("at", [0.001, 0.5, 0.999], ids=["header", "middle", "trailer"])
def test_a_flipped_bit_is_a_miss_and_what_is_stored_again_is_whole(pool, pair, at):
    (one, other), before = pair, pool.keys()
    one.store(values(*range(4)))
    damage(pool, before, flip(at))
    names = list(values(*range(4)))
    assert other.load(names) == [None] * 4
    assert one.load(names) == [None] * 4
    # of a value in parts whose head and other parts are damaged, the first load finds the head only
    for _ in range(2):
        assert one.store(values(*range(4))) == [True] * 4
        if (loaded := other.load(names)) != [None] * 4:
            break
    assert loaded == list(values(*range(4)).values())


def test_the_object_of_one_name_under_another_is_a_miss(pool, pair):
    subject, before = pair[0], pool.keys()
    subject.store(values(1))
    first = pool.keys() - before
    subject.store(values(2))
    second = pool.keys() - before - first
    with pool.bare_client() as client:
        for one, other in zip(sorted(first), sorted(second), strict=True):
            assert client.upsert(other, client.get(one)) == 0
    assert subject.load(list(values(1, 2))) == [value(1), None]


def test_with_no_pool_everything_is_a_miss_and_nothing_raises(make_pool, make):
    subject = make(make_pool(), patient=False, wait=False)
    assert subject.store(values(0, 1)) == [False, False]
    assert subject.has(list(values(0, 1))) == [False, False]
    assert subject.load(list(values(0, 1))) == [None, None]


def test_a_killed_pool_is_misses_and_a_new_one_is_found_again(make_pool, make):
    pool = make_pool().start()
    subject = make(pool, patient=False)
    assert subject.store(values(0, 1)) == [True, True]
    pool.kill("store-0")
    pool.kill("master")
    assert subject.load(list(values(0, 1))) == [None, None]
    assert subject.has(list(values(0, 1))) == [False, False]
    assert subject.store(values(2)) == [False]
    pool.start()
    wait_for(lambda: subject.store(values(3)) == [True], "a store in the new pool")
    wait_for(lambda: subject.load(list(values(3))) == [value(3)], "a load from the new pool")


def test_a_stopped_store_node_costs_deadlines_and_never_a_wrong_byte(make_pool, make):
    pool = make_pool().start()
    subject = make(pool, patient=False)
    stored = values(*range(6))
    assert all(subject.store(stored))
    with pool.nodes["store-0"].stopped():
        assert subject.load(list(stored)) == [None] * 6
        assert subject.store(values(7)) == [False]

    def comes_back():
        loaded = subject.load(list(stored))
        assert all(found in (None, good) for found, good in zip(loaded, stored.values(), strict=True))
        return all(subject.store(stored)) and loaded == list(stored.values())

    wait_for(comes_back, "all of it again")


def test_many_threads_store_and_load_the_same_names(pair):
    subject, other = pair

    def work(seed):
        chance, mine = random.Random(seed), pair[seed % 2]
        for _ in range(12):
            some = chance.sample(range(10), 4)
            mine.store(values(*some))
            for n, found in zip(some, mine.load(list(values(*some))), strict=True):
                assert found in (None, value(n))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert all(subject.store(values(*range(10)))), "nothing is in use for ever"
    assert other.load(list(values(*range(10)))) == list(values(*range(10)).values())


def test_after_close_everything_is_a_miss_at_once(pool, make):
    subject = make(pool)
    subject.store(values(0))
    subject.close()
    assert subject.load(list(values(0))) == [None]
    assert subject.has(list(values(0))) == [False]
    assert subject.store(values(1)) == [False]


def test_close_while_others_use_it_ends_all_of_them(pool, make):
    subject = make(pool)
    rounds = [0, 0, 0]
    stop = threading.Event()

    def work(worker):
        while not stop.is_set():
            subject.store(values(worker))
            assert subject.load(list(values(worker)))[0] in (None, value(worker))
            rounds[worker] += 1

    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work, worker) for worker in range(3)]
        wait_for(lambda: any(one.done() for one in working) or min(rounds) > 2)
        subject.close()
        now = list(rounds)
        wait_for(
            lambda: (
                any(one.done() for one in working)
                or all(after > one for one, after in zip(now, rounds, strict=True))
            )
        )
        stop.set()
        for one in working:
            one.result(300)
