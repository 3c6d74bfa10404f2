"""Weights change while engines run: what was computed with the old ones is loaded by nobody, on a real pool."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pd_cache.config import CacheConfig, DiskTier, LocalTier, MooncakeTier
from pd_cache.mover import ChunkRun
from tests.support.engines import BLOCK, CHUNK, FAST, Host, host
from tests.support.pool import Pool
from tests.support.server import Engine, served
from tests.support.waiting import beside, together, wait_for
from transfer.settings import ByteSize

TOKENS = list(range(5 * CHUNK))
SLOTS, OTHER = TOKENS, list(range(128, 128 + 5 * CHUNK))


@pytest.fixture
def model() -> str:
    """A model of the test's own."""
    return uuid.uuid4().hex


def stored(node: Host) -> None:
    node.compute(TOKENS, SLOTS)
    wait_for(
        lambda: node.store(TOKENS, SLOTS) >= 0 and node.lookup(TOKENS) == len(TOKENS), what="a store going through"
    )


def tiered(tmp_path: Path) -> CacheConfig:
    tiers = (
        LocalTier(capacity=ByteSize(1 << 20)),
        DiskTier(path=str(tmp_path / "cache"), capacity=ByteSize(1 << 20)),
        MooncakeTier(),
    )
    return CacheConfig(chunk_size=CHUNK, tiers=tiers)


def test_chunks_of_old_weights_are_loaded_from_no_tier_of_no_node(pool: Pool, tmp_path: Path, model: str) -> None:
    with host(pool, model=model, cache=tiered(tmp_path)) as one, host(pool, model=model) as other:
        stored(one)
        assert other.lookup(TOKENS) == len(TOKENS)
        assert not pool.reset(model).untold
        for node in (one, other):
            assert node.lookup(TOKENS) == 0
            assert not any(node.retrieve(TOKENS, OTHER))
        one.compute(TOKENS, SLOTS)
        assert one.store(TOKENS, SLOTS) == len(TOKENS)
        assert all(other.retrieve(TOKENS, OTHER))
        assert other.holds(TOKENS, OTHER)


def test_a_store_of_what_old_weights_computed_does_not_land_among_the_new(pool: Pool, model: str) -> None:
    with host(pool, model=model) as one, host(pool, model=model) as other:
        assert one.lookup(TOKENS) == 0
        before = one.engine.epoch
        one.compute(TOKENS, SLOTS)
        assert not pool.reset(model).untold
        one.store(TOKENS, SLOTS, epoch=before)
        assert one.lookup(TOKENS) == other.lookup(TOKENS) == 0


def test_a_node_that_was_away_with_its_disk_learns_of_a_reset_before_it_loads(pool, tmp_path, model):
    cache = tiered(tmp_path)
    with host(pool, model=model, cache=cache) as node:
        stored(node)
    with host(pool, model=model):
        pool.reset(model, "new")
    with host(pool, model=model, cache=cache) as node:
        assert not any(node.retrieve(TOKENS, OTHER))
        assert node.lookup(TOKENS) == 0
        assert not pool.reset(model, "new").untold, "now it knows that it has these weights"
        stored(node)


def test_while_no_master_answers_nothing_is_loaded_and_a_new_one_learns_what_is_current(make_pool, tmp_path, model):
    pool = make_pool().start()
    with host(pool, model=model, cache=tiered(tmp_path), **FAST) as node:
        stored(node)
        pool.kill("master")
        wait_for(lambda: node.lookup(TOKENS) == 0, what="the last answer having lapsed")
        assert not any(node.retrieve(TOKENS, OTHER))
        assert node.store(OTHER, SLOTS) == 0
        pool.start("master")
        wait_for(lambda: node.lookup(TOKENS) == len(TOKENS), what="its own tiers")
        pool.kill("master")
        assert node.engine.version.reset(timeout=0.5) is None
        pool.start("master")
        assert node.lookup(TOKENS) == 0
        wait_for(lambda: node.engine.reset("w1") is not None, what="a master that takes the reset")
        begun = node.engine.epoch
        assert node.lookup(TOKENS) == 0
        stored(node)
        pool.kill("master")
        pool.start("master")
        wait_for(lambda: node.lookup(TOKENS) == len(TOKENS), what="a master that has learned the version")
        assert node.engine.epoch == begun
        with host(pool, model=model) as new:
            assert new.lookup(TOKENS) == 0
            assert new.engine.epoch is None


def test_engines_that_change_one_after_another_load_only_what_equal_weights_computed(pool: Pool, model: str) -> None:
    with host(pool, model=model) as one, host(pool, model=model) as other:
        stored(one)
        label = other.engine.reset()
        assert label
        assert one.lookup(TOKENS) == other.lookup(TOKENS) == 0
        assert one.engine.reset() == label
        stored(one)
        assert all(other.retrieve(TOKENS, OTHER))
        assert other.holds(TOKENS, OTHER)


def test_two_resets_at_once_while_all_threads_load_leave_no_node_with_kv_of_old_weights(pool: Pool, model: str) -> None:
    part = TOKENS[: 2 * CHUNK]
    begun: list[float] = []
    """When each load began that brought anything."""
    over = threading.Event()

    def load(node: Host, place: int) -> None:
        slots = list(range(place * len(part), (place + 1) * len(part)))
        while not over.is_set():
            now = time.monotonic()
            if any(node.retrieve(part, slots)):
                begun.append(now)

    done: list[float] = []

    def reset(by: Callable[[], object]) -> None:
        assert by()
        done.append(time.monotonic())

    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(host(pool, model=model)) for _ in range(3)]
        stored(nodes[0])
        stack.enter_context(beside(*(partial(load, nodes[n % 3], 6 + n // 3) for n in range(14))))
        stack.callback(over.set)
        wait_for(lambda: len(begun) > 100, what="loads on all threads")
        together(partial(reset, nodes[1].engine.reset), partial(reset, partial(pool.reset, model)))
        wait_for(lambda: len({node.engine.version.current() for node in nodes}) == 1, what="one version on all nodes")
        assert nodes[0].engine.version.current() is not None
        end = time.monotonic() + 3
        wait_for(lambda: time.monotonic() > end, what="loads that go on")
        over.set()
        assert len(done) == 2
        assert not [at for at in begun if at > min(done)]
        stored(nodes[2])
        assert all(nodes[0].retrieve(TOKENS, OTHER))


def test_a_load_of_what_was_found_in_an_earlier_epoch_is_a_miss_whatever_is_there_now(pool: Pool, model: str) -> None:
    with host(pool, model=model) as node:
        stored(node)
        found = node.engine.find(node.engine.name_chunks(TOKENS))
        assert node.engine.reset()
        stored(node)
        names, blocks = node.engine.name_chunks(TOKENS), list(range(10))
        loaded = node.engine.load(names, blocks, kv_caches=node.cache, epoch=found.epoch)
        assert (loaded.chunks, loaded.reason) == (0, "reset")
        assert node.engine.load(names, blocks, kv_caches=node.cache).chunks == len(names)


def test_a_reset_between_two_turns_of_a_servers_load_makes_all_of_it_a_miss(pool, tmp_path, model, monkeypatch):
    monkeypatch.setattr("pd_cache.server.moves.TURN_BYTES", 1)
    with served(pool, tmp_path) as server, Engine(server.url, model) as engine:
        wait_for(lambda: all(backend.available for backend in server.models.backends), what="the server's pool")
        engine.store("a", TOKENS)
        assert engine.lookup("b", TOKENS) == len(TOKENS)
        (served_model,) = server.models
        load, turns = served_model.mover.load, []

        def load_and_reset(run: ChunkRun, timeout: float | None = None) -> object:
            restored = load(run, timeout)
            turns.append(restored)
            if len(turns) == 3:
                pool.reset(model)
            return restored

        monkeypatch.setattr(served_model.mover, "load", load_and_reset)
        bad = engine.retrieve("b", TOKENS, first_block=32)
        assert bad == set(range(32, 32 + len(TOKENS) // BLOCK))


def test_a_store_that_waits_in_the_server_belongs_to_the_version_in_which_it_came(pool, tmp_path, model, monkeypatch):
    with served(pool, tmp_path) as server, Engine(server.url, model) as engine, host(pool, model=model) as other:
        wait_for(lambda: all(backend.available for backend in server.models.backends), what="the server's pool")
        assert engine.lookup("a", TOKENS) == 0
        (served_model,) = server.models
        store = served_model.mover.store

        def store_after_a_reset(run: ChunkRun, timeout: float | None = None) -> object:
            assert not pool.reset(model).untold
            return store(run, timeout)

        monkeypatch.setattr(served_model.mover, "store", store_after_a_reset)
        engine.store("a", TOKENS)
        assert engine.lookup("b", TOKENS) == other.lookup(TOKENS) == 0
