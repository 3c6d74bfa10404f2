"""One peer, one object, one call: what its failure costs, and whom."""

import os
import threading
import time
import uuid
from contextlib import contextmanager

import msgspec
import pytest

from pd_cache.config import CacheConfig, MooncakeTier
from pd_cache.lookup import PrefixLookup
from pd_cache.tiers.mooncake import MooncakeBackend
from tests.support.backends import pool_memory
from tests.support.engines import CHUNK, host
from tests.support.waiting import beside, wait_for
from transfer.deadlines import end_in
from transfer.errors import Status

pytestmark = pytest.mark.slow(seconds=70)

OK = Status.OK

PAYLOAD = 64 << 10
SLOTS = 32
PATIENT = {"exist_ms": 60_000, "get_ms": 60_000, "put_ms": 60_000, "close_ms": 60_000}
"""Deadlines that no machine is too busy for."""


@contextmanager
def backend(pool, segment="any", **timeouts):
    """A backend of 32 slots, whose objects go to `segment`."""
    settings = pool.settings(
        CacheConfig(tiers=(MooncakeTier(preferred_segment=segment),)),
        transfer={"timeouts": {**PATIENT, **timeouts}},
    )
    transfer = msgspec.structs.replace(settings.transfer, staging_size=SLOTS * (PAYLOAD + 4096))
    settings = msgspec.structs.replace(settings, transfer=transfer)
    opened = MooncakeBackend(settings, pool_memory(settings, PAYLOAD))
    try:
        opened.wait_available(60)
        yield opened
    finally:
        opened.close()
        opened.memory.pool.check_integrity()


def fresh(count):
    return [uuid.uuid4().hex for _ in range(count)]


def put(backend, keys):
    """Each with its own byte, one after the other."""
    statuses = []
    for key in keys:
        staged = backend.stage(end=end_in(60))
        assert staged is not None, "no memory"
        staged.payload[:] = bytes([len(key) % 251]) * PAYLOAD
        staged.seal(key)
        statuses += backend.batched_put([key], [staged], end=end_in(60)).results()
    return statuses


def get(backend, keys, timeout=None):
    """The reasons of the misses; empty for a hit."""
    reasons = []
    for fetched in backend.batched_get(keys, end=end_in(timeout)):
        reasons.append(backend.check(fetched))
        fetched.release()
    return reasons


@pytest.fixture
def two_stores(make_pool):
    """The master keeps a store node that is stopped for as long as a test runs."""
    return make_pool(segment="64MiB", client_ttl_s=600).start("master", "store-0", "store-1")


def test_while_the_pool_is_away_a_load_does_not_wait_for_memory_that_other_reads_hold(make_pool):
    pool, hour_ms = make_pool(segment="64MiB").start(), 3_600_000
    with backend(pool, get_ms=hour_ms) as reader:
        held = []
        while (slot := reader.staging.lease(0.0, reader._reads)) is not None:
            held.append(slot)
        pool.stop("master")
        wait_for(lambda: reader.batched_contains(fresh(1), end_in(1.0)) == [Status.POOL_DOWN], "the breaker")
        assert get(reader, fresh(3)) == ["pool_down"] * 3, "at once, not after an hour"
        for slot in held:
            slot.release()


def test_a_store_node_that_is_stopped_takes_neither_memory_nor_the_pool_from_calls_to_others(two_stores):
    pool = two_stores
    lost, kept = fresh(24), fresh(24)
    with backend(pool, pool.segment(0)) as writer:
        assert set(put(writer, lost)) == {OK}
    with backend(pool, pool.segment(1), get_ms=9000, put_ms=9000) as node:
        assert set(put(node, kept)) == {OK}
        # a peer that is met for the first time while it is stopped holds the call for Mooncake's handshake, a
        # minute more
        assert get(node, lost[:1]) == [""]
        with pool.nodes["store-0"].stopped():
            with beside(*[lambda: get(node, lost)] * 6):
                wait_for(lambda: node.staging.in_use >= SLOTS // 4, "readers that hold memory")
                # meanwhile
                assert set(put(node, fresh(4))) == {OK}
                assert node.available
            assert node.available, "a peer that does not deliver says nothing about the pool"
            wait_for(lambda: node.store._moves.peers.any_silent(time.monotonic()), "the first call to end")
            wait_for(
                lambda: set(get(node, lost[:4])) == {"transfer_failed"},
                "the readers' calls to end; it is not asked, or fails",
            )
            assert set(get(node, kept)) == {""}
            assert set(put(node, fresh(4))) == {OK}
        wait_for(lambda: set(get(node, lost)) == {""}, "the peer being asked again")
        wait_for(lambda: node.staging.in_use == 0, "the last calls to end")


def test_puts_that_pile_up_at_a_store_node_that_is_stopped_leave_memory_to_reads_of_others(two_stores):
    pool = two_stores
    kept = fresh(8)
    with backend(pool, pool.segment(1)) as writer:
        assert set(put(writer, kept)) == {OK}
    with backend(pool, pool.segment(0)) as node:
        assert set(get(node, kept)) == {""}
        assert set(put(node, fresh(2))) == {OK}
        held_up, done = threading.Semaphore(0), threading.Event()

        def pile_up():
            while not done.is_set():
                staged = node.stage(end=end_in(0.2))
                if staged is None:
                    held_up.release()
                else:
                    node.batched_put(fresh(1), [staged], end=end_in(60))  # nobody waits for it

        with pool.nodes["store-0"].stopped(), beside(*[pile_up] * 6):
            try:
                for _ in range(20):
                    assert held_up.acquire(timeout=60), "puts take what they may"
                    # a miss for want of memory comes after the whole of this, for want of time on a busy
                    # machine, too
                    assert "no_staging" not in get(node, kept, timeout=1)
                assert set(get(node, kept)) == {""}
                assert node.staging.in_use <= SLOTS // 2
            finally:
                done.set()
        wait_for(lambda: node.staging.in_use == 0, "the last calls to end")
        assert set(put(node, fresh(4))) == {OK}


@pytest.mark.parametrize("whole", [True, False], ids=["flipped", "larger"])
def test_a_damaged_object_under_a_popular_prefix_is_healed_by_the_next_round(pool, whole):
    tokens, slots = list(range(64)), list(range(64))
    with host(pool, timeouts=PATIENT) as node:
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 64
        victim = node.keys(tokens)[1]
        if whole:
            pool.damage(victim)
        else:
            with pool.bare_client() as client:
                assert client.upsert(victim, bytes(1 << 20)) == 0
        assert node.lookup(tokens) == 64, "which leases it, as each lookup does"

        # Mooncake ends a connection now and then after what hung in the test before: then a read fails, and
        # damages nothing
        def loaded(count):
            return sum(node.retrieve(tokens, slots)) == count

        wait_for(lambda: loaded(CHUNK) and node.lookup(tokens) == CHUNK, "the damage being seen")
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == CHUNK
        assert node.lookup(tokens) == 64
        wait_for(lambda: loaded(64), "all being loaded")
        assert node.engine.metrics.totals()["tier_healed", "mooncake"] == 1


def test_a_damaged_object_that_was_replaced_meanwhile_is_not_removed(pool, monkeypatch):
    with backend(pool) as node, pool.bare_client() as client:
        keys = fresh(2)
        assert put(node, keys) == [OK] * 2
        good = client.get(keys[0])
        pool.damage(keys[0])
        start_get, looks = node.store.start_get, 0

        def replaced_before_the_second_look(*args, **options):
            nonlocal looks
            looks += 1
            if looks == 2:
                assert client.upsert(keys[0], good) == 0
            return start_get(*args, **options)

        monkeypatch.setattr(node.store, "start_get", replaced_before_the_second_look)
        assert get(node, keys) == ["corrupt", ""]
        assert looks == 2
        assert get(node, keys) == ["", ""]
        metrics = node._metrics.counts.totals()
        assert ("tier_healed", "mooncake") not in metrics or metrics["tier_healed", "mooncake"] == 0


def test_what_came_whole_is_used_before_a_damaged_object_of_its_batch_is_read_again(pool, monkeypatch):
    with backend(pool) as node, pool.bare_client() as client:
        monkeypatch.setattr(node, "batch_size", 3)
        keys = fresh(3)
        assert put(node, keys) == [OK] * 3
        whole = client.get(keys[1])
        cut = whole[:-1] + bytes([whole[-1] ^ 1])  # its key's checksum
        assert (client.remove(keys[1], True), client.put(keys[1], cut)) == (0, 0)
        reads, start_get = [], node.store.start_get

        def noted(keys, *args, **options):
            reads.append(keys)
            return start_get(keys, *args, **options)

        monkeypatch.setattr(node.store, "start_get", noted)
        found = []
        for together in node.batched_fetch(keys):
            found.append(([one.reason for one in together], len(reads)))
            for one in together:
                one.release()
        assert found == [([""], 1), (["foreign", ""], 2)]


def test_removing_damage_takes_no_longer_than_the_reader_has(pool, monkeypatch):
    with backend(pool) as node:
        keys = fresh(1)
        assert put(node, keys) == [OK]
        pool.damage(*keys)
        given = []

        def never_answers(keys, end, *, force=False):
            given.append(end)
            return [Status.TIMEOUT]

        monkeypatch.setattr(node.store, "remove", never_answers)
        assert get(node, keys, timeout=30) == ["corrupt"]
        assert len(given) == 1
        assert given[0] <= time.monotonic() + 30, "less than exist_ms, which is a minute here"


def test_a_key_that_another_writer_has_begun_and_not_ended_is_not_counted_as_stored(pool):
    tokens, slots = list(range(40)), list(range(40))
    with pool.bare_client() as client, host(pool, timeouts=PATIENT) as node:
        node.compute(tokens, slots)
        keys = node.keys(tokens)
        assert client.batch_put_session_start(keys[1:2], [100]) == [0]
        assert node.store(tokens, slots) == 40 - CHUNK
        assert node.troubles("store") == {"busy": 1}
        assert node.lookup(tokens) == CHUNK
        assert client.batch_put_session_revoke(keys[1:2]) == [0]
        assert node.store(tokens, slots) == CHUNK
        assert node.lookup(tokens) == 40


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # threads, which is what this is about
def test_an_engine_is_closed_in_a_forked_child_and_goes_on_in_its_parent(pool):
    tokens = slots = list(range(40))
    with host(pool, timeouts=PATIENT, segment_size=16 << 20) as node:
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 40
        prefix = PrefixLookup(node.engine.groups, node.engine.backend)
        names = node.engine.name_chunks(tokens)
        assert prefix.find(names).chunks == 5
        child = os.fork()
        # nothing that pytest has registered may run in it, nor a destructor of Mooncake's threads
        if not child:
            lost = node.lookup(tokens) == 0 and node.store(tokens, slots) == 0
            lost = lost and not any(node.retrieve(tokens, slots)) and not node.engine.available
            lost = lost and prefix.find(names).reason == "not_asked"
            node.engine.close()
            node.engine.close()
            os._exit(0 if lost else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert node.lookup(tokens) == 40


def test_nothing_but_close_ends_the_thread_that_keeps_the_store(pool, monkeypatch):
    troubles = [OSError("out of threads"), RuntimeError("odd"), MemoryError()]

    def breaks(size, probe):
        if troubles:
            raise troubles.pop()

    monkeypatch.setattr("transfer.store.prefault_segment", breaks)
    with host(
        pool, wait=False, segment_size=16 << 20, prefault=True, breaker={"probe_interval_ms": 50}
    ) as node:
        node.engine.wait_available(60)
        assert not troubles
        assert node.lookup([1] * 8) == 0
