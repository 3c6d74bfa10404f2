"""The pool's KV events, of a real master: what is stored, removed, evicted, reset or lost with its node is published."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from launch.masters import keys_at
from launch.pool_events import PoolWatch
from launch.proxy.block_index import BlockBudget, KnownPool, NamedPrompt
from pd_cache.cluster import NodeRecord
from pd_cache.epochs import Epochs
from pd_cache.kv_events import ClearedEvent, Forget, RemovedEvent, Step
from pd_cache.pool_contents import PoolListing
from pd_cache.tokens import ChunkedTokenDatabase, Namespace
from pd_cache.wire.event_streams import EventEndpoints, EventPublisher, EventSubscriber
from tests.support.pool import Pool, free_port
from tests.support.proxy import NAMESPACE
from tests.support.waiting import wait_for
from transfer.errors import Status
from transfer.store import MooncakeStore

DATABASE = ChunkedTokenDatabase(NAMESPACE)


def names(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{number}".encode()).digest()[:16] for number in range(count)]


class Heard:
    """What a subscriber knows of the pool."""

    def __init__(self, watch: PoolWatch, subscriber: EventSubscriber) -> None:
        self.watch, self.subscriber = watch, subscriber
        self.pool = KnownPool(BlockBudget(1 << 20))
        self.cleared = 0

    def apply(self, steps: Sequence[Step]) -> None:
        self.cleared += sum(
            isinstance(event, ClearedEvent) for step in steps if not isinstance(step, Forget) for event in step.events
        )
        self.pool.apply(steps)

    def chunks(self, prefix: Sequence[bytes]) -> int:
        prompt = NamedPrompt.of(NAMESPACE.fingerprint(), 256 * len(prefix), (), 1, prefix, 256)
        return self.pool.tokens(prompt) // 256


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Callable[[Pool], Heard]]:
    with ExitStack() as stack:

        def hear(pool: Pool, begun: Callable[[], object] = lambda: None, **options: Any) -> Heard:
            ends = EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")
            options = {"interval_s": 0.05, **options}
            watch = PoolWatch(f"http://127.0.0.1:{pool.metrics_port}", ends, most_chunks=10_000, **options)
            stack.callback(watch.close)
            subscriber = stack.enter_context(closing(EventSubscriber(check_s=0.5, again_s=0.02)))
            made = Heard(watch, subscriber)
            subscriber.follow({"pool": (ends, made.apply)})
            begun()
            watch.start()
            return made

        yield hear


def put(store: MooncakeStore, chunks: Sequence[bytes], epoch: str = "", size: int = 1000) -> None:
    for key in DATABASE.all_shard_keys(chunks, epoch):
        assert store.put_small(key, b"x" * size, timeout=10) is Status.OK


@pytest.fixture(scope="module")
def own_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("events"), segment="32MiB", lease_ttl_ms=1000)
    try:
        yield pool.start()
    finally:
        pool.end()


@pytest.fixture
def store(own_pool: Pool) -> Iterator[MooncakeStore]:
    settings = own_pool.settings()
    with MooncakeStore(settings.transfer, master=own_pool.address, host="127.0.0.1", segment_size=0) as store:
        store.wait_open(60)
        yield store
        # what a test looked up has a lease for a second
        wait_for(lambda: store.remove_matching("^pdc1/", timeout=10) >= 0 and not own_pool.ask("/get_all_keys").strip())


def test_what_is_stored_and_removed_is_published(own_pool: Pool, store: MooncakeStore, heard: Any) -> None:
    chunks = names(8, "plain")
    one = heard(own_pool)
    put(store, chunks)
    wait_for(lambda: one.chunks(chunks) == 8, what="all are stored")
    store.remove(DATABASE.all_shard_keys(chunks[5:6]), timeout=10, force=True)
    wait_for(lambda: one.chunks(chunks) == 5, what="the removal is published")
    assert one.cleared == 0


def test_to_look_at_the_pool_keeps_nothing_from_eviction(own_pool: Pool, store: MooncakeStore, heard: Any) -> None:
    """A remove without force fails on a key with a lease, so it shows that listing gave none. A lookup gives one."""
    chunks = names(3, "leases")
    one = heard(own_pool)
    put(store, chunks)
    wait_for(lambda: one.chunks(chunks) == 3, what="they were listed")
    keys_at(f"http://127.0.0.1:{own_pool.metrics_port}", 10, 1 << 20)
    key, asked = DATABASE.all_shard_keys(chunks[1:])
    assert store.remove([key], timeout=10) == [Status.OK]
    store.batch_exist([asked], timeout=10)
    assert store.remove([asked], timeout=10) != [Status.OK]


def test_what_the_master_evicts_is_published(own_pool: Pool, store: MooncakeStore, heard: Any) -> None:
    chunks = names(80, "evicted")
    one = heard(own_pool)
    with own_pool.bare_client() as client:
        for key in DATABASE.all_shard_keys(chunks):
            wait_for(lambda key=key: client.put(key, b"x" * 1_000_000) == 0, what="room")
    gone = [chunk for chunk in chunks if DATABASE.all_shard_keys([chunk])[0] not in set(own_pool.keys())]
    assert gone, "80 MB do not fit into 64"
    wait_for(lambda: not any(one.chunks([chunk]) for chunk in gone), what="every eviction is published")
    wait_for(lambda: sum(one.chunks([chunk]) for chunk in chunks) == len(own_pool.keys()), what="and nothing else")


def test_what_a_read_did_not_find_is_published_as_removed_before_the_next_list(
    own_pool: Pool, store: MooncakeStore, heard: Any, tmp_path: Path
) -> None:
    chunks = names(8, "reads")
    one = heard(own_pool, lambda: put(store, chunks), interval_s=600)
    wait_for(lambda: one.chunks(chunks) == 8, what="the only list has come")
    store.remove(DATABASE.all_shard_keys([chunks[6], chunks[3]]), timeout=10, force=True)
    one.subscriber.report_missing("pool", NAMESPACE.fingerprint(), chunks[5:7])
    wait_for(lambda: one.chunks(chunks[4:]) == 2, what="the one that is gone is published, and not the other")
    ends = EventEndpoints(f"ipc://{tmp_path}/engine", f"ipc://{tmp_path}/engine.replay")
    with closing(EventPublisher(ends, list)) as engine:
        record = NodeRecord(name="p", role="prefill", address="http://p", events=ends.stream, replays=ends.replay)
        one.watch.follow([record])
        engine.publish([RemovedEvent([chunks[2] + b"x" * 16, chunks[3] + b"x" * 16], "STORAGE")])
        wait_for(lambda: one.chunks(chunks) == 3, what="what an engine did not find is checked, too")
    assert one.watch.lists == 1


def test_a_reset_of_the_weights_clears_all(own_pool: Pool, store: MooncakeStore, heard: Any) -> None:
    def namespace(fingerprint: str) -> Namespace | None:
        return NAMESPACE if fingerprint == NAMESPACE.fingerprint() else None

    chunks = names(4, "reset")
    one = heard(own_pool, read_namespace=namespace)
    assert store.put_small(DATABASE.manifest_key, NAMESPACE.manifest(), timeout=10) is Status.OK
    put(store, chunks)
    wait_for(lambda: one.chunks(chunks) == 4, what="they are stored")
    epochs = Epochs(store, NAMESPACE.model, timeout_s=10)
    label = epochs.begin()
    assert label is not None
    wait_for(lambda: one.cleared == 1 and one.chunks(chunks) == 0, what="the reset is published")
    put(store, chunks[:2], label)
    wait_for(lambda: one.chunks(chunks) == 2, what="chunks of the new epoch count")


def test_chunks_of_a_node_that_died_are_published_as_removed(make_pool: Any, heard: Any) -> None:
    pool = make_pool(segment="32MiB", client_ttl_s=2).start("master", "store-0", "store-1")
    chunks, one = names(40, "death"), heard(pool)
    with pool.bare_client() as client:
        for key in DATABASE.all_shard_keys(chunks):
            assert client.put(key, b"x" * 1000) == 0
        wait_for(lambda: one.chunks(chunks) == 40, what="all are stored")
        pool.kill("store-1")
        wait_for(lambda: 0 < sum(one.chunks([chunk]) for chunk in chunks) < 40, what="its chunks are gone")
        pool.kill("store-0")
        wait_for(lambda: not any(one.chunks([chunk]) for chunk in chunks), what="all are gone")


def test_a_master_that_is_away_changes_nothing_until_it_answers(make_pool: Any, heard: Any) -> None:
    pool = make_pool(segment="32MiB").start()
    chunks = names(3, "away")
    with MooncakeStore(pool.settings().transfer, master=pool.address, host="127.0.0.1", segment_size=0) as store:
        store.wait_open(60)
        one = heard(pool)
        put(store, chunks)
        wait_for(lambda: one.chunks(chunks) == 3, what="they are stored")
        pool.kill("master")
        assert one.chunks(chunks) == 3
        pool.start("master")
        wait_for(lambda: one.chunks(chunks) == 0, what="the new master has lost all keys")


def test_namespaces_that_cannot_be_read_do_not_keep_others_from_being_read(tmp_path: Path) -> None:
    def read(fingerprint: str) -> Namespace | None:
        return NAMESPACE if fingerprint == NAMESPACE.fingerprint() else None

    ends = EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")
    with closing(PoolWatch("http://127.0.0.1:1", ends, interval_s=1, most_chunks=1, read_namespace=read)) as watch:
        lost = [f"pdc1/{number:016}/manifest".encode() for number in range(9)]
        listing = PoolListing([*lost, DATABASE.manifest_key.encode()], 1)
        for _ in range(3):
            watch._learn_namespaces(listing)
        assert watch._namespaces == {NAMESPACE.fingerprint(): NAMESPACE}


def test_a_list_that_is_too_long_or_no_list_is_an_error() -> None:
    import http.server

    class Lists(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.startswith("/long") else 500)
            self.end_headers()
            self.wfile.write(b"key\n" * 100)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Lists) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            base = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(ValueError, match="more than 399 bytes"):
                keys_at(f"{base}/long", 10, 399)
            assert len(keys_at(f"{base}/long", 10, 400)) == 101
            with pytest.raises(ValueError, match="status 500"):
                keys_at(base, 10, 400)
        finally:
            server.shutdown()
            thread.join()


def test_the_masters_role_publishes_them_where_the_file_says(make_pool: Any) -> None:
    port, _replays = free_port(), free_port()  # one after the other
    pool, chunks = make_pool(segment="32MiB", events_port=port, events_interval_ms=50), names(5, "role")
    known = KnownPool(BlockBudget(1 << 20))
    pool.start()
    with pool.bare_client() as client, closing(EventSubscriber(check_s=0.5, again_s=0.02)) as subscriber:
        subscriber.follow(
            {"pool": (EventEndpoints(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"), known.apply)}
        )
        for key in [*DATABASE.all_shard_keys(chunks), DATABASE.manifest_key]:
            value = NAMESPACE.manifest() if key.endswith("manifest") else b"x" * 1000
            assert client.put(key, value) == 0
        prompt = NamedPrompt.of(NAMESPACE.fingerprint(), 256 * 5, (), 1, chunks, 256)
        wait_for(lambda: known.tokens(prompt) == 5 * 256, what="they are published")
        assert client.remove(DATABASE.all_shard_keys(chunks)[2]) == 0
        wait_for(lambda: known.tokens(prompt) == 2 * 256, what="and the removal")
