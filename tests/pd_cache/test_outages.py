"""The pool fails in every way that a test can cause; engines and lookup clients go on."""

import pytest

from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from tests.support.engines import CHUNK, FAST, host
from tests.support.waiting import wait_for
from transfer.errors import PoolUnavailableError

TOKENS = list(range(40))
SLOTS = list(range(40))


def storing(node):
    """Each call stores what is missing; True once all of it was newly stored: a pool that comes back takes a
    part first."""
    stored = 0

    def whole():
        nonlocal stored
        stored += node.store(TOKENS, SLOTS)
        return stored >= 40

    return whole


def test_without_a_pool_an_engine_starts_misses_at_once_and_works_when_it_comes(make_pool):
    pool = make_pool()
    with host(pool, wait=False, **FAST) as node:
        for _ in range(20):
            assert node.lookup(TOKENS) == 0
            assert node.store(TOKENS, SLOTS) == 0
            assert not any(node.retrieve(TOKENS, SLOTS))
        assert not node.engine.available
        with pytest.raises(
            PoolUnavailableError, match=r"not reachable after 0\.5 s: no connection: Connection refused"
        ):
            node.engine.wait_available(0.5)
        assert node.engine.find(node.engine.name_chunks(TOKENS)).reason == "pool_down"
        assert set(node.troubles("lookup")) == {"pool_down"}, (
            "an outage is no plain miss, and no deadline was waited for"
        )
        pool.start()
        wait_for(lambda: node.engine.available, "the engine finding the master")
        wait_for(storing(node), "a store going through")
        assert node.lookup(TOKENS) == 40


def test_memory_serves_what_it_holds_while_the_master_is_dead(make_pool):
    pool = make_pool().start()
    tiers = (LocalTier(capacity="1MiB"), MooncakeTier())
    with host(pool, cache=CacheConfig(chunk_size=CHUNK, tiers=tiers), **FAST) as node:
        wait_for(storing(node), "a store going through")
        pool.kill("master")
        others = node.engine.name_chunks(list(range(100, 140)))
        wait_for(lambda: node.engine.find(others).reason == "pool_down", "a lookup that noticed it")
        assert node.lookup(TOKENS) == 40
        assert all(node.retrieve(TOKENS, SLOTS))


def test_a_store_node_killed_between_lookup_and_load_is_a_miss_with_a_reason(make_pool):
    pool = make_pool().start()
    with host(pool, **FAST) as node:
        wait_for(storing(node), "a store going through")
        assert node.lookup(TOKENS) == 40
        pool.kill("store-0")
        assert not any(node.retrieve(TOKENS, SLOTS))
        assert set(node.troubles("retrieve")) <= {"transfer_failed", "timeout", "pool_down"}
        assert node.troubles("retrieve")
        pool.start("store-1")
        wait_for(storing(node), "another node taking the chunks")
