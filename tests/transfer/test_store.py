"""MooncakeStore against a real master and a real store node; what holds for both ways to be a client, with
both."""

import threading
import time
import urllib.request
import uuid
from contextlib import contextmanager

import msgspec
import pytest

from tests.support.waiting import wait_for
from transfer.deadlines import end_in
from transfer.errors import MissingLibraryError, Status, TransferError
from transfer.settings import Placement, TransferSettings
from transfer.staging import StagingPool
from transfer.store import GetResult, MooncakeStore

OK, MISSING = Status.OK, Status.MISSING

SLOT = 4096
FOUND = GetResult(OK, SLOT)
"""What a read of a whole slot returns."""


@contextmanager
def opened(pool, *, slots=8, slot=SLOT, segment_size=0, placement=None, **transfer):
    settings = pool.settings(transfer=transfer).transfer
    settings = msgspec.structs.replace(settings, staging_size=slots * (-(-slot // 4096) * 4096))
    with MooncakeStore(
        settings, master=pool.address, segment_size=segment_size, placement=placement
    ) as store:
        staging = store.staging(slot)
        store.wait_open(60)
        yield store, staging
    staging.check_integrity()
    staging.close()


def leased(staging, count, fill=None):
    slots = [staging.lease(time.monotonic() + 1) for _ in range(count)]
    for index, slot in enumerate(slots):
        assert slot is not None
        if fill is not None:
            slot.view[:] = bytes([fill[0] + index]) * slot.size
    return slots


def fresh(count):
    return [f"test/{uuid.uuid4().hex}" for _ in range(count)]


def put(store, staging, keys, fill=b"a", **placement):
    """Puts whole slots. With a `placement` of their own, if one is given."""
    slots, there = leased(staging, len(keys), fill), Placement(**placement) if placement else None
    try:
        return store.start_put(
            keys, slots, [slot.size for slot in slots], end_in(60), placement=there
        ).results()
    finally:
        release(slots)


def get(store, keys, slots):
    return store.start_get(keys, slots, end_in(60)).results()


def release(slots):
    for slot in slots:
        slot.release()


def test_bytes_that_were_put_come_back_until_they_are_removed_and_missing_keys_say_so(pool):
    with opened(pool) as (store, staging):
        keys = fresh(3)
        assert put(store, staging, keys[:2]) == [OK, OK]
        slots = leased(staging, 3)
        assert get(store, keys, slots) == [FOUND, FOUND, GetResult(MISSING, 0)]
        assert bytes(slots[0].view) == b"a" * SLOT
        assert bytes(slots[1].view) == b"b" * SLOT
        for bad, sizes in (([], []), (["a", "b"], [1, 1]), (["a"], [0]), (["a"], [SLOT + 1])):
            with pytest.raises(ValueError):
                store.start_put(bad, slots[:1], sizes, end_in(60))
        release(slots)
        assert staging.in_use == 0
        # which leases the first two
        assert store.batched_contains(keys, end_in(60)) == [OK, OK, MISSING]
        assert store.remove(keys, end_in(60)) == [Status.BUSY, Status.BUSY, MISSING]
        assert store.remove(keys, end_in(60), force=True) == [OK, OK, MISSING]
        assert store.get_small(keys[2], end_in(60)) is None
        assert store.put_small(keys[2], b"in words", end_in(60)) is OK
        assert store.get_small(keys[2], end_in(60)) == b"in words"
        for _ in range(10):
            store.batched_contains(["k"], end_in(0.0))
        assert store.available, "an impatient caller says nothing about the pool"


def test_a_put_with_a_segment_lands_on_the_writers_own_node_whose_memory_is_resident(pool, caplog):
    caplog.set_level("INFO", logger="transfer.staging")
    key = fresh(1)
    with opened(pool, segment_size=32 << 20, prefault=True) as (store, staging):
        assert put(store, staging, key) == [OK]
        assert [record for record in caplog.records if "33554432 bytes prefaulted in" in record.getMessage()]
    with opened(pool) as (store, _):
        assert store.batched_contains(key, end_in(60)) == [MISSING], "unmounted with its segment"


def test_an_answer_that_came_too_late_is_for_the_next_lookup_of_the_same_keys(pool, monkeypatch):
    with opened(pool, direct_lookups=False, timeouts={"exist_ms": 100}, breaker={"failures": 3}) as (
        store,
        staging,
    ):
        keys, asked, go_on = fresh(2), [], threading.Event()
        assert put(store, staging, keys[:1]) == [OK]

        class Slow:
            def __getattr__(self, name):
                return getattr(client, name)

            def batch_is_exist(self, keys):
                asked.append(keys)
                go_on.wait(60)
                return client.batch_is_exist(keys)

        client, store._client = store._client, Slow()
        try:
            for late_s in (float("inf"), float("-inf")):
                monkeypatch.setattr("transfer.store._LATE_S", late_s)
                asked.clear()
                go_on.clear()
                while not asked:  # a lookup that no thread has begun by its end is dropped
                    assert store.batched_contains(keys, end_in(0.1)) == [Status.TIMEOUT] * 2
                for _ in range(3 if late_s > 0 else 0):
                    assert store.batched_contains(keys, end_in(0.1)) == [Status.TIMEOUT] * 2
                assert store.available, "a call counts once"
                go_on.set()
                assert store.batched_contains(keys[:1], end_in(60)) == [OK], "the answer for other keys"
                assert store.batched_contains(keys, end_in(60)) == [OK, MISSING]
                assert (asked.count(keys) == 1) is (late_s > 0), "an old answer is of no use"
        finally:
            go_on.set()
            store._client = client


def test_calls_after_close_answer_closed_and_closing_twice_is_fine(pool):
    with opened(pool) as (store, staging):
        store.close()
        store.close()
        slots = leased(staging, 1)
        assert store.batched_contains(["k"], end_in(60)) == [Status.CLOSED]
        assert get(store, ["k"], slots) == [GetResult(Status.CLOSED, 0)]
        assert store.start_put(["k"], slots, [SLOT], end_in(60)).results() == [Status.CLOSED]
        assert store.get_small("k", end_in(60)) is None
        with pytest.raises(TransferError, match="closed"):
            store.wait_open(1)


def test_memory_that_cannot_be_registered_fails_the_store_in_words_and_unmounts_its_segment(
    pool, monkeypatch
):
    from transfer.store import load_mooncake

    staging = StagingPool(8192, 4096, prefaulted=False)
    settings = pool.settings().transfer
    module = load_mooncake()
    monkeypatch.setattr(module.MooncakeDistributedStore, "register_buffer", lambda *_: -600)
    store = MooncakeStore(settings, master=pool.address, segment_size=16 << 20)
    try:
        try:
            store.attach(staging)
        except TransferError:
            pass  # it was open already
        else:
            with pytest.raises(TransferError, match="refused to register"):
                store.wait_open(60)
    finally:
        store.close()
        staging.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{pool.metrics_port}/get_all_segments") as page:
        assert len(page.read().decode().split()) == 1, "only the store node's segment is mounted"


def test_a_stopped_peer_costs_the_deadline_and_quarantines_the_slots(make_pool):
    pool = make_pool().start()
    with opened(pool, timeouts={"get_ms": 1000}, threads=1) as (store, staging):
        keys = fresh(2)
        put(store, staging, keys)
        with pool.nodes["store-0"].stopped():
            slots = leased(staging, 2)
            start = time.monotonic()
            results = store.start_get(keys, slots, end_in(1)).results()
            assert time.monotonic() - start < 30, "a bound, not a measurement"
            assert all(result.status in (Status.TIMEOUT, Status.TRANSFER_FAILED) for result in results)
            release(slots)

            if results[0].status is Status.TIMEOUT:
                assert staging.in_use == 2, "slots that the stuck call may still write were handed out"
        wait_for(lambda: staging.in_use == 0, "the stuck call to end")


def test_mooncakes_client_in_rust_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("MOONCAKE_STORE_BACKEND", "rs")
    with pytest.raises(MissingLibraryError, match="MOONCAKE_STORE_BACKEND is 'rs' in the environment"):
        MooncakeStore(TransferSettings(), master="127.0.0.1:1")


@pytest.mark.parametrize(
    "library, package", [("libibverbs", "libibverbs1"), ("libmlx5", "ibverbs-providers")]
)
def test_the_missing_system_library_is_named(monkeypatch, library, package):
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("mooncake"):
            raise ImportError(f"{library}.so.1: cannot open shared object file: No such file or directory")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingLibraryError, match=f"apt-get install {package}"):
        MooncakeStore(TransferSettings(), master="127.0.0.1:1")
