"""What engines that do not use the adapters, such as vLLM's connector, ask of a cache server."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cache.chunks import CacheMetadata, ChunkNamer, stride_hashes
from pd_cache.config import CacheConfig
from pd_cache.errors import RefusedError
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import Slots
from pd_cache.reasons import Loaded, StoreOutcome, TierChunks
from pd_cache.server.client import ServerCache, ServerLookupClient
from pd_cache.server.connection import ServerConnection
from pd_cache.server.protocol import Answer, EngineIdentity, Retrieve, Store, Stored
from pd_cache.server.server import CacheServer
from tests.support.engines import BLOCK, BLOCKS, CHUNK
from tests.support.kv import holds_token, make_cache, write_prompt
from tests.support.pool import Pool
from tests.support.server import LATE_S, PER_CHUNK, move_unchecked, served
from tests.support.waiting import wait_for

TOKENS = list(range(3 * CHUNK))
WHOLE = list(range(3 * PER_CHUNK))
"""The blocks of all of `TOKENS`, from block 0."""


class Worker:
    """A worker's connection and its paged cache."""

    def __init__(self, url: str, model: str, **naming: Any) -> None:
        self.cache = make_cache(blocks=BLOCKS, block_size=BLOCK)
        self.layout = KVLayout.from_tensors(self.cache)
        self.client = ServerConnection(url, None, "worker", EngineIdentity(model=model, block_size=BLOCK, **naming))
        try:
            self.client.register(self.cache)
        except BaseException:
            self.client.close()
            raise

    def names(self) -> list[bytes]:
        return ChunkNamer(self.client.chunk_size).hash_tokens(TOKENS)

    def move(self, kind: Any, blocks: list[int], names: list[bytes] | None = None) -> Answer:
        return move_unchecked(self.client, kind, self.names() if names is None else names, blocks)

    def store_surely(self) -> None:
        """Again until it is there: a server's store opens in the background."""
        write_prompt(self.cache, self.layout, TOKENS, range(len(TOKENS)))

        def stored() -> bool:
            answer = self.move(Store, WHOLE)
            assert isinstance(answer, Stored)
            return not answer.failed

        wait_for(stored, 30)


@pytest.fixture
def server(pool: Pool, tmp_path: Path) -> Iterator[CacheServer]:
    with served(pool, tmp_path) as one:
        yield one


@pytest.fixture
def worker(server: CacheServer) -> Iterator[Worker]:
    one = Worker(server.url, uuid.uuid4().hex)
    try:
        one.store_surely()
        yield one
    finally:
        one.client.close()


def test_a_store_tells_what_became_of_each_chunk(worker: Worker) -> None:
    new = [*worker.names()[:1], bytes(16)]
    answer = worker.move(Store, WHOLE[: 2 * PER_CHUNK], new)
    assert isinstance(answer, Stored)
    assert [StoreOutcome(one) for one in answer.outcomes] == [StoreOutcome.BEFORE, StoreOutcome.NEW]


@pytest.mark.parametrize(
    ("kind", "blocks", "message"),
    [
        (Store, [-1, *range(1, len(WHOLE))], "values from -1"),
        (Store, [*range(1, len(WHOLE)), -1], "values from -1"),
        (Retrieve, [0, -1, *range(2, len(WHOLE))], "values from -1"),
        (Retrieve, [-1, -1, *range(BLOCKS - len(WHOLE) + 3, BLOCKS + 1)], f"to {BLOCKS}"),
    ],
    ids=["a store leaves out none", "nor at the end", "only at the ends", "beyond the cache"],
)
def test_other_blocks_that_are_none_are_refused(worker: Worker, kind: Any, blocks: list[int], message: str) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        worker.move(kind, blocks)
    assert refused.value.reason == "invalid"


def test_engines_choose_how_chunks_are_named_where_the_file_leaves_it_open(server: CacheServer, worker: Worker) -> None:
    model = worker.client.hello.engine.model
    hashes = [bytes([index]) * 32 for index in range(len(WHOLE))]
    with ExitStack() as stack:
        ways: list[dict[str, Any]] = [
            {},
            {"hash_mode": "blocks", "hash_seed": "a"},
            {"hash_mode": "blocks", "hash_seed": "b"},
        ]
        workers = [Worker(server.url, model, **way) for way in ways]
        for one in workers:
            stack.callback(one.client.close)
        assert len({model.database.namespace.fingerprint() for model in server.models}) == 3
        _, one, other = workers
        names = stride_hashes(hashes, PER_CHUNK)
        answer = one.move(Store, WHOLE, names)
        assert isinstance(answer, Stored)
        assert answer.stored == 3
        assert one.move(Retrieve, WHOLE, names) == Loaded(3, tiers=TierChunks(pool=3))
        assert other.move(Retrieve, WHOLE, names) == Loaded(0, "never_stored"), "the same names mean other chunks"


def test_an_engine_that_names_chunks_in_another_way_than_the_file_says_is_refused(pool: Pool, tmp_path: Path) -> None:
    with (
        served(pool, tmp_path, cache=CacheConfig(chunk_size=CHUNK, hash_mode="tokens")) as server,
        pytest.raises(RefusedError, match=r"hash_mode is tokens, the engine's is blocks"),
    ):
        Worker(server.url, "m", hash_mode="blocks")


def test_a_lookup_of_a_scheduler_pins_what_it_found_until_its_request_ends(
    server: CacheServer, worker: Worker, pool: Pool
) -> None:
    metadata = CacheMetadata.of(worker.client.hello.engine.model, worker.layout)
    settings = pool.settings(CacheConfig(chunk_size=CHUNK))
    metrics = CacheMetrics()
    client = ServerLookupClient(settings, metadata, server.url, LATE_S, metrics=metrics)
    try:
        assert client.lookup(TOKENS, "r") in (0, 3 * CHUNK), "a server that is not there yet is a miss"
        wait_for(lambda: client.available)
        assert client.lookup([*TOKENS, 1, 2], "r") == 3 * CHUNK
        assert client.lookup(TOKENS, "s", at_hand=CHUNK + 1) == 3 * CHUNK
        assert server.sessions.pinned == 3 + 2
        client.end("r")
        client.end("s")
        wait_for(lambda: not len(server.sessions))
        server.close()
        wait_for(lambda: not client.available)
        assert client.lookup(TOKENS, "t") == 0
        assert metrics.totals()["troubles", "lookup", "server_lost"] >= 1
    finally:
        client.close()


# --- ServerCache -----------------------------------------------------------------------------------------------------


@pytest.fixture
def identity() -> EngineIdentity:
    return EngineIdentity(model=uuid.uuid4().hex, block_size=BLOCK)


@pytest.fixture
def cache(server: CacheServer, identity: EngineIdentity) -> Iterator[ServerCache]:
    """A cache over the server, with tensors of its own."""
    one = ServerCache(server.url, identity, move_timeout_s=LATE_S)
    try:
        one.register_kv_caches(make_cache(blocks=BLOCKS, block_size=BLOCK))
        one.connection.wait_ready(60)
        yield one
    finally:
        one.close()


def test_a_mistake_takes_no_ticket_and_counts_nothing(cache: ServerCache) -> None:
    for places, message in ((Slots(torch.arange(1, 3 * CHUNK + 1)), "whole blocks"), ([0, 1], "3 chunks were named")):
        with pytest.raises(ValueError, match=message):
            cache.store(cache.name_chunks(TOKENS), places)
    assert not cache.connection.fence.taken
    assert ("tokens", "store", "requested") not in {key for key, value in cache.metrics.totals().items() if value}


def test_an_engine_that_has_no_scheduler_says_itself_that_its_weights_have_changed(cache: ServerCache) -> None:
    names = cache.name_chunks(TOKENS)
    wait_for(lambda: cache.store(names, WHOLE) and cache.lookup(names) == len(names), what="the chunks in the pool")
    before = cache.epoch
    assert cache.reset() not in (None, before)
    assert cache.lookup(names) == 0
    assert cache.epoch != before


def test_a_wait_that_an_exception_ends_leaves_no_ticket_and_no_place(
    cache: ServerCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(future: Any) -> None:
        raise KeyboardInterrupt

    names = cache.name_chunks(TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(cache.connection.link, "wait", interrupted)
        for operation in (cache.store, cache.retrieve):
            with pytest.raises(KeyboardInterrupt):
                operation(names, WHOLE)  # type: ignore[operator]
            assert cache.connection.fence.taken == 0, "the server may touch the blocks no more"
    wait_for(lambda: all(cache.store(names, WHOLE)), 30, "the cache working as before")


def test_tensors_that_replace_others_while_those_are_being_registered_are_the_ones_that_are_used(
    server: CacheServer, cache: ServerCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    serve = server.models.serve

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return serve(*arguments)

    monkeypatch.setattr(server.models, "serve", slow)
    old, new = (make_cache(blocks=BLOCKS, block_size=BLOCK) for _ in range(2))
    first = threading.Thread(target=cache.register_kv_caches, args=(old,))
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=cache.register_kv_caches, args=(new,))
    second.start()
    wait_for(lambda: cache.connection._lent is not None and cache.connection._lent[0] is new)
    go_on.set()
    first.join(60)
    second.join(60)
    write_prompt(new, KVLayout.from_tensors(new), TOKENS, range(len(TOKENS)))
    names = cache.name_chunks(TOKENS)
    wait_for(lambda: cache.available and all(cache.store(names, WHOLE)), 30, "the prompt being stored")
    elsewhere = [block + 20 for block in WHOLE]
    assert cache.retrieve(names, elsewhere) == 3
    layout = KVLayout.from_tensors(new)
    assert all(holds_token(new, layout, TOKENS[: index + 1], 20 * BLOCK + index) for index in range(len(TOKENS))), (
        "and not what lies in the old ones"
    )


def test_after_close_nothing_is_under_way_and_nothing_raises(cache: ServerCache) -> None:
    pending = cache.begin_retrieve(cache.name_chunks(TOKENS), WHOLE)
    cache.close()
    pending.wait()
    assert pending.query()
    assert pending.loaded in (0, 3)
    assert cache.lookup(cache.name_chunks(TOKENS)) == 0
    assert not any(cache.store(cache.name_chunks(TOKENS), WHOLE))
