"""Clients that share memory with the `mooncake_client` of their host: what it takes that a full client does not."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char, string_at
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.pool import Pool
from tests.support.waiting import wait_for
from tests.transfer.test_store import SLOT, fresh, leased, opened, put
from transfer.errors import PoolUnavailableError, Status
from transfer.host import HostClient, answers
from transfer.settings import TransferSettings
from transfer.staging import SharedStagingPool, StagingPool
from transfer.store import GetResult, MooncakeStore

FAST = {"breaker": {"failures": 2, "probe_interval_ms": 200}, "timeouts": {"exist_ms": 300, "get_ms": 1000}}


@pytest.fixture
def own_pool(make_pool: Callable[..., Pool]) -> Pool:
    """A host pool to be broken."""
    return make_pool(client="host", segment="64MiB").start()


def get(store: MooncakeStore, staging: StagingPool, key: str, timeout: float = 5) -> tuple[GetResult, bytes]:
    slot = leased(staging, 1)[0]
    try:
        slot.view[:] = bytes(SLOT)
        return store.start_get([key], [slot], timeout=timeout).results()[0], bytes(slot.view)
    finally:
        slot.release()


def clients_of(pool: Pool, name: str = "store-0") -> list[psutil.Process]:
    """The `mooncake_client` of a store node."""
    return psutil.Process(pool.nodes[name].process.pid).children()


@contextmanager
def stopped(client: psutil.Process) -> Iterator[None]:
    """The process, every thread of it, stands still while the block runs."""
    client.suspend()
    try:
        wait_for(lambda: all(psutil.Process(thread.id).status() == "stopped" for thread in client.threads()))
        yield
    finally:
        client.resume()


def test_embedded_and_host_clients_read_each_others_bytes(host_pool: Pool) -> None:
    embedded = {"client": "embedded", "client_address": ""}
    with opened(host_pool) as (shared, shared_staging), opened(host_pool, **embedded) as (full, full_staging):
        for writer, memory, reader, other in (
            (shared, shared_staging, full, full_staging),
            (full, full_staging, shared, shared_staging),
        ):
            key = fresh(1)
            assert put(writer, memory, key, b"x") == [Status.OK]
            assert get(reader, other, key[0]) == (GetResult(Status.OK, SLOT), b"x" * SLOT)


def test_two_host_clients_of_one_process_have_memory_of_their_own(host_pool: Pool) -> None:
    with opened(host_pool) as (one, ones), opened(host_pool) as (two, twos):
        assert ones.address != twos.address
        key = fresh(1)
        assert put(one, ones, key, b"1") == [Status.OK]
        assert get(two, twos, key[0])[1] == b"1" * SLOT


def test_a_store_opens_by_itself_when_its_mooncake_client_comes(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(client="host", segment="64MiB").start("master")
    settings = pool.settings(transfer=FAST).transfer
    with MooncakeStore(settings, master=pool.address) as store:
        staging = store.staging(SLOT)
        with pytest.raises(PoolUnavailableError, match=f"mooncake_client {pool.segment(0)}"):
            store.wait_open(0.3)
        assert store.batch_exist(["k"], timeout=1) == [Status.POOL_DOWN]
        assert staging.lease(time.monotonic() + 5) is None, "no memory yet, and no waiting for it"
        pool.start("store-0")
        store.wait_open(60)
        assert put(store, staging, fresh(1)) == [Status.OK]
    staging.close()


def test_memory_is_right_again_after_the_mooncake_client_was_killed_and_started(own_pool: Pool) -> None:
    with opened(own_pool, **FAST) as (store, staging):
        assert put(store, staging, fresh(1)) == [Status.OK]
        held = leased(staging, 1, b"h")[0]
        (client,) = clients_of(own_pool)
        client.kill()
        own_pool.nodes.pop("store-0").stop()
        assert store.batch_exist(["k"], timeout=1)[0] in (Status.POOL_DOWN, Status.TIMEOUT)
        own_pool.start("store-0")
        key = fresh(1)

        def stored() -> bool:
            return bool(store.available and staging.address and put(store, staging, key, b"z") == [Status.OK])

        wait_for(stored, 30, "the store finding the new mooncake_client")
        assert get(store, staging, key[0]) == (GetResult(Status.OK, SLOT), b"z" * SLOT)
        assert bytes(held.view) == b"h" * SLOT, "what a reader holds stays as it is"
        held.release()
        staging.check_integrity()


def test_all_host_clients_of_a_process_find_back_after_an_outage_of_the_master(own_pool: Pool) -> None:
    with opened(own_pool) as (one, ones), opened(own_pool) as (two, twos):
        own_pool.kill("master")
        for store in (one, two):
            client = store._client._now.client
            wait_for(lambda client=client: client.health_check() != 0, what="the dummy client noticing it")
        own_pool.start("master")
        for store, staging in ((one, ones), (two, twos)):

            def stored(store: MooncakeStore = store, staging: StagingPool = staging) -> bool:
                return store.available and put(store, staging, fresh(1)) == [Status.OK]

            wait_for(stored, what="the pool being found back")


def test_memory_that_the_mooncake_client_forgot_is_replaced_and_its_slots_never_come_back(host_pool: Pool) -> None:
    with opened(host_pool, slots=4, **FAST) as (store, staging):
        forgotten = staging.address
        held = leased(staging, 1, b"h")[0]
        store._client._now.client.unregister_buffer(forgotten)  # as after ten seconds without a sign of life
        assert put(store, staging, fresh(1)) == [Status.POOL_DOWN]
        assert bytes(held.view) == b"h" * SLOT
        wait_for(lambda: store.available, 15, "the store opening anew")
        slots = leased(staging, 4)
        assert all(not forgotten <= slot.address < forgotten + staging.nbytes for slot in slots)
        for slot in (held, *slots):
            slot.release()
        staging.check_integrity()
        key = fresh(1)
        assert put(store, staging, key, b"n") == [Status.OK]
        assert get(store, staging, key[0])[1] == b"n" * SLOT


def test_a_stopped_mooncake_client_costs_the_deadline_and_quarantines_the_slots(own_pool: Pool) -> None:
    with opened(own_pool, **FAST) as (store, staging):
        key = fresh(1)
        assert put(store, staging, key) == [Status.OK]
        (client,) = clients_of(own_pool)
        with stopped(client):
            assert not answers(own_pool.segment(0)), "nobody sets up a client that would hang with the GIL"
            start = time.monotonic()
            assert get(store, staging, key[0], timeout=0.5)[0].status is Status.TIMEOUT
            assert store.batch_exist(key, timeout=0.3)[0] is Status.TIMEOUT
            assert time.monotonic() - start < 30, "a bound, not a measurement"
            assert staging.in_use == 1, "the stuck call may still write to its slot"
        wait_for(lambda: staging.in_use == 0, 20, "the stuck call to end")
        wait_for(lambda: store.available, 20, "the pool being found back")


@pytest.mark.slow
def test_a_read_that_a_stopped_mooncake_client_carries_out_later_writes_to_memory_that_nobody_is_given(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(client="host", segment="64MiB", client_ttl_s=90).start()
    with opened(pool, slots=4, **FAST) as (store, staging):
        key = fresh(1)
        assert put(store, staging, key, b"l") == [Status.OK]
        old = range(staging.address, staging.address + staging.nbytes)
        slot = leased(staging, 1)[0]
        slot.view[:] = bytes(SLOT)
        (client,) = clients_of(pool)
        with stopped(client):
            assert store.start_get(key, [slot], timeout=0.5).results()[0].status is Status.TIMEOUT
            wait_for(lambda: staging.address == 0, 40, "the stuck call to give up, and its memory to be retired")
        wait_for(
            lambda: bytes(slot.view) == b"l" * SLOT, 20, "the late write, to a slot that only this test still holds"
        )
        wait_for(lambda: store.available, 20, "the store opening anew")
        slots = leased(staging, 4)
        assert all(other.address not in old for other in slots)
        for other in (slot, *slots):
            other.release()
        assert get(store, staging, key[0]) == (GetResult(Status.OK, SLOT), b"l" * SLOT)


def test_the_store_role_has_its_segment_resident_when_it_is_ready_and_unmounts_it_when_it_is_stopped(
    own_pool: Pool,
) -> None:
    (client,) = clients_of(own_pool)
    assert client.memory_info().rss > 64 << 20
    assert own_pool.ask("/get_all_segments").strip() == own_pool.segment(0)
    own_pool.stop("store-0")
    assert own_pool.ask("/get_all_segments").strip() == ""


def test_a_mooncake_client_does_not_outlive_a_killed_store_role(own_pool: Pool) -> None:
    (client,) = clients_of(own_pool)
    own_pool.kill("store-0")
    wait_for(lambda: not client.is_running(), 10, "mooncake_client to end")
    assert own_pool.ask("/get_all_segments").strip() == "", "and it unmounted its segment"


def test_a_store_role_whose_mooncake_client_dies_ends_with_a_message(own_pool: Pool) -> None:
    (client,) = clients_of(own_pool)
    client.kill()
    node = own_pool.nodes.pop("store-0")
    assert node.process.wait(60) == 1
    node.stop()
    assert "mooncake_client ended with -9" in "".join(node.errors)


def test_a_host_client_needs_an_address_and_gives_no_memory(host_pool: Pool) -> None:
    settings = host_pool.settings().transfer
    with pytest.raises(ValueError, match="needs client_address"):
        MooncakeStore(msgspec.structs.replace(settings, client_address=""), master=host_pool.address)
    with pytest.raises(ValueError, match="must have a segment_size of 0"):
        MooncakeStore(settings, master=host_pool.address, segment_size=64 << 20)
    with MooncakeStore(settings, master=host_pool.address) as store, pytest.raises(ValueError, match="StagingPool"):
        store.attach(StagingPool(SLOT, SLOT, prefaulted=False))


# --- what a real mooncake_client does too rarely, or too slowly, for a test ------------------------------------------


class Dummy:
    """A dummy client whose transfers answer `code` after `seconds`, and whose memory is mapped by nobody else."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.closed = False
        self.registered: set[int] = set()
        self.maps: list[mmap.mmap] = []

    def setup_dummy(self, *_: object) -> int:
        return 0

    def close(self) -> int:
        self.closed = True
        return 0

    def alloc_from_mem_pool(self, size: int) -> int:
        self.maps.append(mmap.mmap(-1, size))
        return addressof(c_char.from_buffer(self.maps[-1]))

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.add(address)
        return self.code

    def unregister_buffer(self, address: int) -> int:
        self.registered.discard(address)
        return 0

    def batch_get_into(self, keys: list[str], *_: object) -> list[int]:
        return [self.code] * len(keys)

    def put_from(self, *_: object) -> int:
        return 0

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [0] * len(keys)


@pytest.fixture
def host_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("transfer.host.answers", lambda _: True)
    monkeypatch.setattr("transfer.staging._spare", {})  # a real client could not use this one's memory
    made: list[Dummy] = []
    losses: list[str] = []

    def dummy() -> Dummy:
        made.append(Dummy())
        return made[-1]

    client = HostClient(dummy, "127.0.0.1:1", lambda: losses.append("lost"))
    assert client.setup({}) == 0
    yield client, made, losses
    client.close()
    assert all(one.closed for one in made)


def test_a_call_that_gave_up_late_may_still_be_under_way_and_ends_the_connection(
    host_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, made, losses = host_client
    made[0].code = -900
    assert client.batch_get_into(["k"], [1], [1]) == [-900]
    assert not losses, "a call that fails at once ended with its mooncake_client"
    monkeypatch.setattr("transfer.host._SURELY_ENDED_S", -1.0)
    assert client.batch_get_into(["k"], [1], [1]) == [-900]
    assert losses == ["lost"]
    assert client.batch_get_into(["k"], [1], [1]) == [-900], "no connection, no call"
    assert client.setup({}) == 0
    assert made[0].closed
    assert client.batch_get_into(["k"], [1], [1]) == [0]


def test_a_refusal_that_is_not_about_the_memory_stays_one(host_client: Any) -> None:
    client, made, losses = host_client
    made[0].code = -600
    assert client.batch_get_into(["larger than its slot"], [1], [1]) == [-600]
    assert not losses


def test_what_a_late_put_may_still_read_stays_while_a_call_is_inside_the_old_connection(host_client: Any) -> None:
    client, made, _ = host_client
    address = client._small.address
    with client._small_slot() as slot:
        slot.view[:4] = b"late"
    with client._calling():
        client.lose("a put gave up")
        assert client.setup({}) == 0
        assert not made[0].closed
        assert string_at(address, 4) == b"late"
    client.lose("again")
    assert client.setup({}) == 0
    assert made[0].closed
    assert string_at(address, 4) == bytes(4)


def test_a_connection_whose_memory_is_refused_is_closed(host_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, made, _ = host_client
    client.lose("for a new one")
    monkeypatch.setattr(Dummy, "register_buffer", lambda *_: -600)
    assert client.setup({}) == -600
    assert all(one.closed for one in made)
    assert client.is_exist("k") == -900, "there is no connection"


def test_memory_of_a_closed_pool_is_used_again_and_holds_nothing_of_before() -> None:
    dummy = Dummy()
    size = 5 * 4096  # no other test's
    first = SharedStagingPool(size, SLOT)
    assert first.register_with(dummy) == 0
    address = first.address
    slot = leased(first, 1, b"s")[0]
    slot.release()
    first.unregister_from(dummy)
    first.close()
    second = SharedStagingPool(size, SLOT)
    assert second.register_with(dummy) == 0
    assert second.address == address
    held = leased(second, 5)
    assert all(bytes(slot.view) == bytes(SLOT) for slot in held)
    second.close()
    third = SharedStagingPool(size, SLOT)
    assert third.register_with(dummy) == 0
    assert third.address != address, "a pool whose slots were still out is not taken over"
    third.close()


def test_retired_memory_is_given_back_when_neither_a_slot_nor_the_mooncake_client_uses_it() -> None:
    dummy = Dummy()
    pool = SharedStagingPool(2 * 4096, SLOT)
    assert pool.register_with(dummy) == 0
    first, second = leased(pool, 2, b"s")
    pool.retire()
    assert pool.try_lease() is None
    first.release()
    assert pool.register_with(dummy) == 0
    assert bytes(first.view) == b"s" * SLOT, "a put may be carried out late, and must find what it was given"
    pool.let_go()
    assert bytes(second.view) == b"t" * SLOT, "a reader still holds it"
    second.release()
    assert bytes(second.view) == bytes(SLOT), "its pages are gone"
    assert pool.in_use == 0
    pool.check_integrity()
    pool.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_address": "127.0.0.1:1"}, "only client: host uses it"),
        ({"client": "host", "client_address": "here"}, "must be an address such as"),
        ({"client": "host", "segment_size": 64 << 20}, "only store nodes give memory"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferSettings(**options)
