"""Where objects go and how long they stay, on real pools: each option has its effect."""

import time

from tests.support.waiting import wait_for
from tests.transfer.test_store import FOUND, SLOT, fresh, get, leased, opened, put, release
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import Placement

OK = Status.OK

MIB = 1 << 20


def readable(store, staging, keys, fill):
    slots = leased(staging, len(keys))
    try:
        results = get(store, keys, slots)
        return all(
            result.status is OK and bytes(slot.view) == bytes([fill[0] + index]) * SLOT
            for index, (result, slot) in enumerate(zip(results, slots, strict=True))
        )
    finally:
        release(slots)


def test_of_two_replicas_the_one_that_counts_as_read_is_the_one_that_is_read(make_pool):
    pool = make_pool(client_ttl_s=600).start("master", "store-0", "store-1")
    with opened(pool, slots=16) as (store, staging):
        keys, probes = fresh(16), fresh(2)
        for index in range(2):
            segment = pool.segment(index)
            some = keys[8 * index : 8 * (index + 1)]
            assert put(store, staging, some, replicas=2, preferred_segment=segment) == [OK] * 8
            assert put(store, staging, [probes[index]], preferred_segment=segment) == [OK]
        replicas = store._moves._replicas([*probes, *keys])
        dead, alive = (replicas[probe].peer for probe in probes)
        read_from = {key: replicas[key].peer for key in keys}
        assert set(read_from.values()) == {dead, alive}
        pool.kill("store-0")
        unlucky, slots = fresh(2), leased(staging, 1)
        failed = put(store, staging, unlucky, replicas=2)
        assert failed == [Status.TRANSFER_FAILED] * 2, "one copy of two is a failure"
        assert store.batched_contains(unlucky, end_in(60)) == [Status.MISSING] * 2
        assert not store._moves.peers.any_silent(time.monotonic()), "which of the two failed is not known"
        for key in [key for key in keys if read_from[key] == alive]:
            assert get(store, [key], slots) == [FOUND]
        assert not store._moves.peers.any_silent(time.monotonic())
        for key in [key for key in keys if read_from[key] == dead]:
            assert get(store, [key], slots)[0].status is Status.TRANSFER_FAILED
        assert set(store._moves.peers._silent) == {dead}


def test_a_copy_in_the_own_segment_is_read_whichever_the_master_names_first(pool):
    with (
        opened(pool, slots=16, segment_size=32 << 20, placement=Placement(replicas=2)) as (owner, memory),
        opened(pool) as (other, _),
    ):
        keys = fresh(8)
        assert put(owner, memory, keys) == [OK] * 8
        assert set(other._moves._replicas(keys)) == set(keys)
        assert owner._moves.own_peer
        assert owner._moves._replicas(keys) == {}, "a read of them concerns no peer"


def test_a_preferred_segment_gets_the_bytes_any_spreads_them_and_two_replicas_survive_the_loss_of_one(
    make_pool,
):
    pool = make_pool().start("master", "store-0", "store-1")
    first, second = pool.segment(0), pool.segment(1)

    def put_all(**placement):
        with opened(pool, placement=Placement(**placement)) as (store, staging):
            keys = fresh(40)
            for start in range(0, 40, 8):
                assert put(store, staging, keys[start : start + 8], b"r") == [OK] * 8
            return keys

    def used():
        return pool.used(0), pool.used(1)

    with opened(pool, placement=Placement(preferred_segment=first)) as (store, staging):
        one, other = fresh(1), fresh(1)
        assert put(store, staging, one, preferred_segment=second) == [OK]
        assert used() == (0, SLOT), "a put may have a placement of its own"
        assert put(store, staging, other) == [OK]
        assert used() == (SLOT, SLOT)
        store.remove([*one, *other], end_in(60), force=True)
    with opened(pool) as (store, staging):
        for segment, expected in ((first, (40 * SLOT, 0)), (second, (0, 40 * SLOT))):
            keys = put_all(preferred_segment=segment)
            assert used() == expected
            store.remove(keys, end_in(60), force=True)
        keys = put_all(preferred_segment="any")
        assert min(used()) > 0
        store.remove(keys, end_in(60), force=True)
        alone = put_all(preferred_segment=first)[:8]
        both = put_all(replicas=2)[:8]
        assert used() == (80 * SLOT, 40 * SLOT)
        pool.kill("store-0")

        wait_for(lambda: readable(store, staging, both, b"r"), "every key being read from its other copy")
        assert not readable(store, staging, alone, b"r")


def test_pinned_objects_survive_pressure_that_evicts_the_others(make_pool):
    pool = make_pool(segment="16MiB").start()
    with opened(pool, slots=1, slot=MIB) as (store, staging):
        pinned, plain, brief = fresh(4), fresh(60), fresh(1)
        pins = ("soft", "soft", "hard", "hard")
        for key, pin in zip(pinned, pins, strict=True):
            assert put(store, staging, [key], pin=pin) == [OK]
        assert put(store, staging, brief, pin="soft", soft_pin_ttl_s=1) == [OK]
        for key in plain[:8]:
            assert put(store, staging, [key]) == [OK]
        time.sleep(1.1)
        later = [put(store, staging, [key])[0] for key in plain[8:]]
        assert set(later) <= {OK, Status.NO_SPACE}
        assert later.count(OK) > 16, "eviction goes on: more was stored than there is room for"
        assert store.available, "a full pool is not a pool that is down"
        assert store.batched_contains(pinned, end_in(60)) == [OK] * 4
        assert Status.MISSING in store.batched_contains(plain[:8], end_in(60))
        assert store.batched_contains(brief, end_in(60)) == [Status.MISSING], "a soft pin holds for its time"
