"""Weights change while engines run: what was computed with the old ones is loaded by nobody, on a real pool."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cache.backends.base import TierKind
from pd_cache.config import CacheConfig, DiskTier, LocalTier, MooncakeTier
from pd_cache.deadline import Deadline
from pd_cache.mover import ChunkRun
from tests.support.engines import BLOCK, CHUNK, Host, host
from tests.support.kv import holds_token
from tests.support.pool import Pool
from tests.support.server import Engine, served
from tests.support.waiting import wait_for
from transfer.settings import ByteSize

TOKENS = list(range(5 * CHUNK))
SLOTS, OTHER = TOKENS, list(range(128, 128 + 5 * CHUNK))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of the test's own, whose nodes ask for its epoch each time instead of twice a second."""
    monkeypatch.setattr("pd_cache.epochs.FRESH_S", 0.0)
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


def test_chunks_of_old_weights_are_loaded_from_no_tier_of_no_node(any_pool: Pool, tmp_path: Path, model: str) -> None:
    with host(any_pool, model=model, cache=tiered(tmp_path)) as one, host(any_pool, model=model) as other:
        stored(one)
        assert other.lookup(TOKENS) == len(TOKENS)
        assert other.engine.reset()
        for node in (one, other):
            assert node.lookup(TOKENS) == 0
            assert not any(node.retrieve(TOKENS, OTHER))
        one.compute(TOKENS, SLOTS)
        assert one.store(TOKENS, SLOTS) == len(TOKENS)
        assert all(other.retrieve(TOKENS, OTHER))
        assert all(holds_token(other.cache, other.layout, TOKENS[: at + 1], OTHER[at]) for at in TOKENS)


def test_a_load_during_which_the_weights_change_is_a_miss(
    pool: Pool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host(pool, model=model) as one, host(pool, model=model) as other:
        stored(one)
        assert all(one.retrieve(TOKENS, OTHER))
        get = one.engine.mover._get

        def get_while_weights_change(run: ChunkRun, timeout: float | None, kinds: list[TierKind]) -> str:
            reason = get(run, timeout, kinds)
            assert other.engine.reset()
            return reason

        monkeypatch.setattr(one.engine.mover, "_get", get_while_weights_change)
        assert not any(one.retrieve(TOKENS, OTHER))
        assert one.troubles("retrieve")["reset"] == len(TOKENS) // CHUNK


def test_a_store_of_what_old_weights_computed_does_not_land_among_the_new(
    pool: Pool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host(pool, model=model) as one, host(pool, model=model) as other:
        assert one.lookup(TOKENS) == 0
        before = one.engine.epoch
        one.compute(TOKENS, SLOTS)
        assert other.engine.reset()
        assert one.lookup(TOKENS) == 0
        one.store(TOKENS, SLOTS, epoch=before)
        put = one.engine.mover._put

        def put_while_weights_change(run: ChunkRun, missing: list[int], deadline: Deadline) -> object:
            assert other.engine.reset()
            assert one.lookup([]) == 0
            return put(run, missing, deadline)

        monkeypatch.setattr(one.engine.mover, "_put", put_while_weights_change)
        one.store(TOKENS, SLOTS)
        assert one.lookup(TOKENS) == other.lookup(TOKENS) == 0


def test_a_node_that_was_away_with_its_disk_learns_of_a_reset_before_it_loads(
    pool: Pool, tmp_path: Path, model: str
) -> None:
    cache = tiered(tmp_path)
    with host(pool, model=model, cache=cache) as node:
        stored(node)
    with host(pool, model=model) as other:
        assert other.engine.reset()
    with host(pool, model=model, cache=cache) as node:
        assert not any(node.retrieve(TOKENS, OTHER))
        assert node.lookup(TOKENS) == 0


def test_while_the_pool_is_away_nothing_is_loaded_and_under_a_new_master_a_new_epoch_begins(
    make_pool: Callable[..., Pool], tmp_path: Path, model: str
) -> None:
    pool = make_pool().start()
    fast = {
        "breaker": {"failures": 2, "probe_interval_ms": 200},
        "timeouts": {"exist_ms": 2_000, "get_ms": 4_000, "put_ms": 4_000},
    }
    with host(pool, model=model, cache=tiered(tmp_path), **fast) as node:
        stored(node)
        pool.kill("master")
        assert node.engine.reset() is None
        assert node.lookup(TOKENS) == 0
        assert not any(node.retrieve(TOKENS, OTHER))
        pool.start("master")
        wait_for(lambda: node.lookup(TOKENS) == len(TOKENS), what="its own tiers, as no reset was taken")
        wait_for(lambda: node.engine.reset() is not None, what="the pool having room for it")
        assert node.lookup(TOKENS) == 0
        begun = node.engine.epoch
        pool.kill("master")
        pool.start("master")
        wait_for(lambda: node.engine.mover.epochs.current() not in (None, begun), what="a new epoch after the loss")
        assert node.lookup(TOKENS) == 0
        with host(pool, model=model) as new:
            wait_for(lambda: new.engine.mover.epochs.current() == node.engine.epoch, what="a new node learning of it")


def test_a_process_that_only_loads_learns_of_a_new_epoch_too(pool: Pool, model: str) -> None:
    with host(pool, model=model) as one, host(pool, model=model) as loads:
        assert not any(loads.retrieve(TOKENS, OTHER))
        assert one.engine.reset()
        stored(one)
        assert all(loads.retrieve(TOKENS, OTHER))
        assert all(holds_token(loads.cache, loads.layout, TOKENS[: at + 1], OTHER[at]) for at in TOKENS)


def test_a_load_of_what_was_found_in_an_earlier_epoch_is_a_miss_whatever_is_there_now(pool: Pool, model: str) -> None:
    with host(pool, model=model) as node:
        stored(node)
        found = node.engine.survey(node.engine.name_chunks(TOKENS))
        assert node.engine.reset()
        stored(node)
        names, blocks = node.engine.name_chunks(TOKENS), list(range(10))
        restored = node.engine.restore(names, blocks, kv_caches=node.cache, epoch=found.epoch)
        assert (restored.chunks, restored.reason) == (0, "reset")
        assert node.engine.restore(names, blocks, kv_caches=node.cache).chunks == len(names)


def test_a_tier_that_is_off_says_nothing_of_epochs(pool: Pool, tmp_path: Path, model: str) -> None:
    (tmp_path / "file").write_text("where a folder belongs")
    disk = DiskTier(path=str(tmp_path / "file" / "cache"), capacity=ByteSize(1 << 20))
    cache = CacheConfig(chunk_size=CHUNK, tiers=(disk, MooncakeTier()))
    with host(pool, model=model) as one, host(pool, model=model, cache=cache) as other:
        stored(one)
        assert other.lookup(TOKENS) == len(TOKENS)
        assert one.engine.reset()
        assert other.lookup(TOKENS) == 0


def test_a_reset_between_two_turns_of_a_servers_load_makes_all_of_it_a_miss(
    pool: Pool, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cache.server.moves.TURN_BYTES", 1)
    with served(pool, tmp_path) as server, Engine(server.url, model) as engine, host(pool, model=model) as other:
        wait_for(lambda: all(backend.available for backend in server.models.backends), what="the server's pool")
        engine.store("a", TOKENS)
        assert engine.lookup("b", TOKENS) == len(TOKENS)
        (served_model,) = server.models
        load, turns = served_model.mover.load, []

        def load_and_reset(run: ChunkRun, timeout: float | None = None) -> object:
            restored = load(run, timeout)
            turns.append(restored)
            if len(turns) == 3:
                assert other.engine.reset()
            return restored

        monkeypatch.setattr(served_model.mover, "load", load_and_reset)
        bad = engine.retrieve("b", TOKENS, first_block=32)
        assert len(turns) == 4
        assert bad == set(range(32, 32 + len(TOKENS) // BLOCK))


def test_a_store_that_waits_in_the_server_belongs_to_the_epoch_in_which_it_came(
    pool: Pool, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(pool, tmp_path) as server, Engine(server.url, model) as engine, host(pool, model=model) as other:
        wait_for(lambda: all(backend.available for backend in server.models.backends), what="the server's pool")
        assert engine.lookup("a", TOKENS) == 0
        (served_model,) = server.models
        store = served_model.mover.store

        def store_after_a_reset(run: ChunkRun, timeout: float | None = None) -> object:
            assert other.engine.reset()
            assert served_model.mover.epochs.current() == other.engine.epoch
            return store(run, timeout)

        monkeypatch.setattr(served_model.mover, "store", store_after_a_reset)
        engine.store("a", TOKENS)
        assert engine.lookup("b", TOKENS) == other.lookup(TOKENS) == 0
