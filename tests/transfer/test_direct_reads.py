"""Reads that do not go through Mooncake's client: on an engine that answers as told, and on a real pool."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.support.waiting import beside, wait_for
from tests.transfer.test_moves import Descriptor, moves_of, settings, soon, whole
from tests.transfer.test_store import FOUND, fresh, get, leased, opened, put, release
from transfer.deadlines import end_in
from transfer.direct_reads import DirectReads, Replica
from transfer.errors import Status, status_of
from transfer.staging import StagingPool
from transfer.store import GetResult, MooncakeStore

OK = Status.OK

FAILED = -800


class Engine:
    """A transfer engine that notes what it was asked to read."""

    def __init__(self):
        self.begun = []
        self.states = {}
        """For each transfer, what is answered when its state is asked, the last answer for good. Without an
        entry it has ended well."""
        self.unreachable = set()
        self.hangs = threading.Event()
        self.hangs.set()

    def initialize(self, host, metadata, protocol, devices):
        return 0

    def batch_transfer_async_read(self, peer, addresses, peer_addresses, sizes):
        self.hangs.wait(60)
        self.begun.append(peer)
        return 0 if peer in self.unreachable else len(self.begun)

    def transfer_check_status(self, transfer):
        states = self.states.get(transfer, [1])
        return states.pop(0) if len(states) > 1 else states[0]


def met(*peers):
    """Direct reads through an engine, of peers that have delivered to Mooncake's client."""
    direct = DirectReads(engine := Engine())
    direct.meet(set(peers))
    return engine, direct


def reads(*peers):
    replicas = [Replica(peer, 4096 * index, 100 + index) for index, peer in enumerate(peers)]
    return replicas, [8192 * index for index in range(len(peers))]


def test_only_objects_of_peers_that_have_delivered_to_mooncakes_client_are_read():
    engine, direct = met("a")
    assert direct.read(*reads("a", "b"), soon()) is None
    direct.meet({"b"})
    engine.states = {1: [0, 0, 1], 2: [0, 1]}
    assert direct.read(*reads("a", "b", "a"), soon()) == [100, 101, 102]
    assert engine.begun == ["a", "b", "a"]


def test_a_peer_whose_transfer_failed_once_is_left_to_mooncakes_client_for_good():
    engine, direct = met("a", "b", "c")
    engine.states, engine.unreachable = {1: [0, -1]}, {"c"}
    assert direct.read(*reads("a", "b", "c", "c"), soon()) == [FAILED, 101, FAILED, FAILED]
    assert engine.begun == ["a", "b", "c"], "the way to a peer that has stopped is looked for once"
    direct.meet({"a", "b", "c"})
    assert direct.read(*reads("a"), soon()) is None
    assert direct.read(*reads("c"), soon()) is None
    assert direct.read(*reads("b"), soon()) == [100]


def test_a_transfer_that_does_not_end_in_time_has_failed():
    engine, direct = met("a")
    engine.states = {1: [0]}
    assert direct.read(*reads("a", "a"), time.monotonic() + 0.01) == [FAILED, 101]


def test_while_the_engine_looks_for_a_way_to_a_peer_others_are_left_to_mooncakes_client():
    engine, direct = met("well", "new")
    assert direct.read(*reads("well"), soon()) == [100]
    engine.hangs.clear()
    found = []
    with beside(lambda: found.append(direct.read(*reads("new"), soon()))):
        wait_for(direct._opening.locked)
        assert direct.read(*reads("well"), soon()) is None
        engine.hangs.set()
    assert found == [[100]]
    assert direct.read(*reads("well", "new"), soon()) == [100, 101]


def test_what_was_read_while_its_lease_may_have_ended_is_of_no_use():
    """The process stood still, or its thread: the memory may have another object's bytes by now. Mooncake's
    client looks for that, too."""
    client = SimpleNamespace(batch_get_replica_desc=lambda keys: {key: [Descriptor("a")] for key in keys})
    moves = moves_of(client, settings(get_ms=500))
    engine, moves.direct = met("a")
    both = whole(["x", "y"], leased(StagingPool(2 * 4096, 4096, prefaulted=False), 2))
    assert moves.get(both, soon()) == [4096, 4096]
    engine.states = {3: [0] * 2000 + [1], 4: [-1]}
    codes = moves.get(both, soon())
    assert [status_of(code) for code in codes] == [Status.LEASE_EXPIRED, Status.TRANSFER_FAILED]


def test_a_master_that_did_not_say_where_objects_lie_is_not_asked_a_second_time(monkeypatch):
    monkeypatch.setattr("transfer.moves._UNANSWERED_S", -1)
    moves = moves_of(SimpleNamespace(batch_get_replica_desc=lambda keys: {}))
    _, moves.direct = met()
    codes = moves.get(whole(["x"], leased(StagingPool(4096, 4096, prefaulted=False), 1)), soon())
    assert [status_of(code) for code in codes] == [Status.POOL_DOWN]


@pytest.fixture
def ways(monkeypatch):
    """How each read of the test went: `client` if it was left to Mooncake's, or else `direct`."""
    taken = []
    read = DirectReads.read

    def noted(self, *how):
        codes = read(self, *how)
        taken.append("client" if codes is None else "direct")
        return codes

    monkeypatch.setattr(DirectReads, "read", noted)
    return taken


def test_after_the_first_read_from_a_peer_bytes_come_without_mooncakes_client_and_are_the_same(pool, ways):
    with opened(pool, slots=16) as (store, staging):
        keys = fresh(12)
        assert put(store, staging, keys) == [OK] * 12
        for _ in range(2):
            slots = leased(staging, 12, b"\0")
            assert get(store, keys, slots) == [FOUND] * 12
            assert [bytes(slot.view[:2]) for slot in slots] == [bytes([byte] * 2) for byte in b"abcdefghijkl"]
            release(slots)
        assert ways[0] == "client"
        assert set(ways[1:]) == {"direct"}
        ways.clear()
        [slot, larger] = leased(staging, 2)
        small = fresh(1)
        assert store.start_put(small, [slot], [100], end_in(60)).results() == [OK]
        assert get(store, small, [larger]) == [GetResult(OK, 100)]
        assert ways == ["direct"]
        missing = get(store, [*small, *fresh(1)], [slot, larger])
        assert [result.status for result in missing] == [OK, Status.MISSING]
        assert ways == ["direct"], "what the master does not know is Mooncake's client's to answer"


@contextmanager
def holding_four(pool):
    """A store of this pool that has put four objects."""
    timeouts = {"get_ms": 3000, "put_ms": 3000, "close_ms": 30_000}
    with opened(pool, timeouts=timeouts) as (store, staging):
        keys = fresh(4)
        assert put(store, staging, keys) == [OK] * 4
        yield pool, store, staging, keys


def test_a_peer_that_hangs_costs_the_deadline_and_is_read_by_mooncakes_client_when_it_goes_on(
    make_pool, ways
):
    with holding_four(make_pool(client_ttl_s=600).start()) as (pool, store, staging, keys):
        slots = leased(staging, 4)

        def got(timeout):
            return [result.status for result in store.start_get(keys, slots, end_in(timeout)).results()]

        assert got(20) == got(20) == [OK] * 4
        with pool.nodes["store-0"].stopped():
            assert got(0.5) == [Status.TIMEOUT] * 4
            wait_for(lambda: store._moves.peers.any_silent(time.monotonic()), "a silent peer")
        wait_for(lambda: got(20) == [OK] * 4, "the peer's objects")
        assert ways[:3] == ["client", "direct", "direct"]
        assert set(ways[3:]) == {"client"}


def test_a_store_that_closes_while_bytes_come_waits_for_them(make_pool):
    with holding_four(make_pool(client_ttl_s=600).start()) as (pool, store, staging, keys):
        slots = leased(staging, 4, b"\0")
        assert get(store, keys, slots) == [FOUND] * 4
        with pool.nodes["store-0"].stopped():
            pending = store.start_get(keys, slots, end_in(60))
            closing = threading.Thread(target=MooncakeStore.close, args=(store,))
            closing.start()
            wait_for(lambda: not store.available)
        assert {result.status for result in pending.results()} <= {OK, Status.TRANSFER_FAILED}
        closing.join(60)
        assert staging.in_use == 4
        release(slots)
        assert staging.in_use == 0
