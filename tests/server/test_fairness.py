"""What one engine asks of a cache server does not keep another one waiting."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.errors import RefusedError
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.server import lookups, moves
from pd_cache.server import server as cache_server
from pd_cache.server.connection import ServerConnection
from pd_cache.server.models import ServedModels, memory_size
from pd_cache.server.protocol import (
    MAX_FRAME,
    EngineIdentity,
    Lookup,
    RefusalError,
    Refused,
    StatusQuery,
    Welcome,
    encode,
)
from pd_cache.server.server import CacheServer
from tests.support.engines import BLOCK, CHUNK
from tests.support.kv import make_cache
from tests.support.pool import Pool
from tests.support.server import Engine, served, store_surely
from tests.support.strange_peer import StrangePeer
from tests.support.waiting import wait_for

TOKENS = list(range(6 * CHUNK))


@pytest.fixture
def server(pool: Pool, tmp_path: Path) -> Iterator[CacheServer]:
    with served(pool, tmp_path) as one:
        yield one


def test_one_client_more_than_the_server_takes_is_refused_and_the_others_stay(
    server: CacheServer, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cache_server, "_MAX_CLIENTS", 3)
    with Engine(server.url) as engine, StrangePeer(server.url) as one, StrangePeer(server.url) as too_many:
        store_surely(engine, TOKENS)
        assert isinstance(one.hello(), Welcome)
        answer = too_many.hello()
        assert isinstance(answer, Refused)
        assert answer.reason == "busy"
        assert isinstance(one.hello(), Welcome), "one that is known may say hello again"
        assert engine.lookup("still there", TOKENS) == len(TOKENS)


# --- lookups, stores and retrieves -----------------------------------------------------------------------------------


def test_a_lookup_in_many_requests_finds_what_one_request_finds(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookups, "REQUEST_KEYS", 2)
    with Engine(server.url) as engine:
        store_surely(engine, TOKENS)
        before = [server.metrics.registry.get_sample_value("pd_cache_tokens_total", tags) or 0 for tags in COUNTED]
        assert engine.lookup("all", TOKENS) == 6 * CHUNK
        assert server.sessions.pinned == 6
        assert engine.lookup("part", [*TOKENS[: 3 * CHUNK], *[9] * 6 * CHUNK]) == 3 * CHUNK
        after = [server.metrics.registry.get_sample_value("pd_cache_tokens_total", tags) or 0 for tags in COUNTED]
        assert [new - old for new, old in zip(after, before, strict=True)] == [15 * CHUNK, 9 * CHUNK]


COUNTED = [{"op": "lookup", "outcome": "requested"}, {"op": "lookup", "outcome": "hit"}]


def test_what_one_lookup_asks_for_is_bounded(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookups, "MOST_KEYS", 4)
    with Engine(server.url) as engine:
        engine.store("a", TOKENS)
        wait_for(lambda: engine.lookup(uuid.uuid4().hex, TOKENS) == 4 * CHUNK or engine.store("a", TOKENS), 30)


def test_more_ranks_than_there_are_heads_anywhere_are_refused(server: CacheServer) -> None:
    with StrangePeer(server.url) as one:
        with pytest.raises(ValueError, match="1024 are the most"):
            EngineIdentity(model="m", world_size=1024, block_size=CHUNK, shards_per_rank=2)
        frame = encode(1, EngineIdentity(model="m", world_size=1024, block_size=CHUNK).hello(one.name, "worker"))
        most, more = msgspec.msgpack.encode(1024), msgspec.msgpack.encode(4096)
        assert frame.count(most) == 1
        one.send([frame.replace(most, more)])  # as no client of ours can say it
        answer = one.hear()
    assert isinstance(answer, Refused)
    assert answer.reason == "malformed"
    assert "1024" in answer.message


def test_a_store_and_a_retrieve_in_many_turns_move_what_one_turn_moves(server: CacheServer, monkeypatch: Any) -> None:
    with Engine(server.url) as engine:
        store_surely(engine, TOKENS[:CHUNK])
        monkeypatch.setattr(moves, "TURN_BYTES", 1)
        store_surely(engine, TOKENS)
        assert engine.lookup("a", TOKENS) == 6 * CHUNK
        assert engine.retrieve("a", TOKENS, 20) == set()
        assert engine.holds(TOKENS, 20)
        wait_for(lambda: not server.sessions.pinned, 5, "the session ending with the retrieve")
        model = next(iter(server.models))
        keys = model.database.keys(model.database.hash_tokens(TOKENS))
        model.mover.backend.store.remove([keys[3]], timeout=5, force=True)  # type: ignore[attr-defined]
        assert engine.retrieve("b", TOKENS, 20) == set(range(20 + 6, 20 + 12)), (
            "it ends at the first chunk that is gone"
        )
        wait_for(lambda: not server.status().in_flight, what="the last turn ending after its answer")


def test_a_request_that_no_server_reads_is_refused_before_it_is_sent(server: CacheServer) -> None:
    client = ServerConnection(server.url, None, "observer")
    try:
        with pytest.raises(RefusedError, match="at most"):
            client.ask(Lookup("x" * MAX_FRAME, b""), 5)
        client.ask(StatusQuery(), 5)
        assert client.lost == 0
    finally:
        client.close()


# --- backends --------------------------------------------------------------------------------------------------------


class FakeBackend:
    available = True

    def __init__(self, settings: NodeSettings, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.segment_size = settings.segment_size
        self.closed = False

    def batched_contains(self, keys: Any, timeout: Any = None) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def models(pool: Pool) -> ServedModels:
    settings = pool.settings(CacheConfig(chunk_size=CHUNK), segment_size=16 << 20)
    return ServedModels(settings, CacheMetrics(), FakeBackend)  # type: ignore[arg-type]


def come(models: ServedModels, heads: int, client: str) -> Any:
    """An engine registers whose chunks are as large as it has heads."""
    engine = EngineIdentity(model=f"model of {heads}", block_size=BLOCK)
    return models.serve(
        models.groups(engine)[0], KVLayout.from_tensors(make_cache(heads=heads, block_size=BLOCK)), client
    )


def test_the_backend_of_engines_that_have_left_makes_room_for_another_size(models: ServedModels) -> None:
    first = come(models, 1, "a")
    others = [come(models, heads, "b") for heads in (2, 3, 4)]
    with pytest.raises(RefusalError, match="would be size number 5"):
        come(models, 5, "c")
    others[1].workers.discard("b")
    assert not others[1].mover.backend.closed, "an engine that comes back finds its chunks"
    come(models, 5, "c")
    assert [one.mover.backend.closed for one in (first, *others)] == [False, False, True, False]
    assert models.get(others[1].group) is None
    assert others[1].mover.closed
    assert come(models, 3 - 1, "d") is others[0], "those that are there go on"
    with pytest.raises(RefusalError, match="would be size number 5"):
        come(models, 3, "b")


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_groups_of_layers_of_similar_size_share_memory_whatever_the_order_in_which_they_come(
    sizes: list[int], rng: random.Random
) -> None:
    shuffled = rng.sample(sizes, len(sizes))
    slots = {size: memory_size(size, sizes) for size in sizes}
    assert slots == {size: memory_size(size, shuffled) for size in sizes}
    assert all(size <= slot <= 2 * size for size, slot in slots.items())
    assert all(slots[slot] == slot for slot in slots.values()), "a slot is as large as the largest payload in it"
    assert memory_size(max(sizes), ()) == max(sizes), "engines with one group share no memory of another size"


def test_the_backend_with_the_segment_goes_last_and_the_next_one_has_it(models: ServedModels) -> None:
    everyone = [come(models, heads, "a") for heads in (1, 2, 3, 4)]
    assert [bool(one.mover.backend.segment_size) for one in everyone] == [True, False, False, False]
    for one in everyone:
        one.workers.clear()
    come(models, 5, "b")
    assert [one.mover.backend.closed for one in everyone] == [False, True, False, False]
    for heads in (6, 7):
        come(models, heads, "b")
    assert not everyone[0].mover.backend.closed
    last = come(models, 8, "b")
    assert everyone[0].mover.backend.closed
    assert last.mover.backend.segment_size


def test_the_memory_of_a_size_that_no_engine_has_any_more_is_let_go_of_after_a_while(models: ServedModels) -> None:
    with_segment, idle, used = (come(models, heads, "a") for heads in (1, 2, 3))
    for one in (with_segment, idle):
        one.workers.clear()
    models.release_idle(600, now=1000.0)
    models.release_idle(600, now=1599.9)
    assert not idle.mover.backend.closed, "an engine that comes back finds its chunks"
    models.release_idle(600, now=1600.0)
    assert [one.mover.backend.closed for one in (with_segment, idle, used)] == [False, True, False]
    assert models.get(idle.group) is None
    assert come(models, 2, "b").mover.backend is not idle.mover.backend


def test_the_size_that_was_used_last_keeps_its_memory_while_there_is_no_engine_at_all(models: ServedModels) -> None:
    everyone = [come(models, heads, "a") for heads in (1, 2, 3)]
    for one in everyone:
        one.workers.clear()
    for now in (0.0, 700.0):
        models.release_idle(600, now)
    assert [one.mover.backend.closed for one in everyone] == [False, True, False]


def test_the_time_without_engines_begins_anew_when_one_comes_back(models: ServedModels) -> None:
    _, idle, _ = (come(models, heads, "a") for heads in (1, 2, 3))
    idle.workers.clear()
    models.release_idle(600, now=1000.0)
    come(models, 2, "b")
    models.release_idle(600, now=1700.0)
    idle.workers.clear()
    come(models, 3, "b")
    models.release_idle(600, now=1800.0)
    assert not idle.mover.backend.closed
    models.release_idle(600, now=2400.0)
    assert idle.mover.backend.closed


def test_the_time_without_engines_begins_anew_also_where_one_came_and_left_unseen(models: ServedModels) -> None:
    _, idle, _ = (come(models, heads, "a") for heads in (1, 2, 3))
    idle.workers.clear()
    models.release_idle(600, now=1000.0)
    come(models, 2, "b").workers.clear()
    come(models, 3, "b")
    models.release_idle(600, now=1601.0)
    assert not idle.mover.backend.closed


def test_others_register_while_a_backend_is_closed_that_nobody_uses(models: ServedModels) -> None:
    _, idle, _ = (come(models, heads, "a") for heads in (1, 2, 3))
    idle.workers.clear()
    came: list[Any] = []
    idle.mover.backend.close = lambda: came.append(come(models, 3, "b"))
    models.release_idle(600, now=1000.0)
    models.release_idle(600, now=1600.0)
    assert came


def test_groups_whose_engines_have_left_are_not_remembered_without_end(models: ServedModels) -> None:
    for index in range(100):
        engine = EngineIdentity(model=f"model {index}", block_size=BLOCK)
        layout = KVLayout.from_tensors(make_cache(heads=1, block_size=BLOCK))
        models.serve(models.groups(engine)[0], layout, "a").workers.clear()
    assert len(list(models)) <= 65
