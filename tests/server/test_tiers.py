"""A cache server with memory of its own: what engines of one host get from each other."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable
from pathlib import Path

from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from tests.support.engines import CHUNK
from tests.support.pool import Pool
from tests.support.server import Engine, served, store_surely
from tests.support.waiting import wait_for
from transfer.settings import ByteSize

TOKENS = list(range(4 * CHUNK))


def with_memory(chunks: int = 64) -> CacheConfig:
    """A local tier for about so many chunks (a page each) before the pool."""
    tiers = (LocalTier(capacity=ByteSize(4096 * chunks)), MooncakeTier())
    return CacheConfig(chunk_size=CHUNK, tiers=tiers)


def test_the_second_engines_hit_needs_no_network(make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make_pool().start()
    with served(pool, tmp_path, cache=with_memory()) as server, Engine(server.url) as first:
        store_surely(first, TOKENS)
        with Engine(server.url, first.model) as second:
            for name in ("store-0", "master"):
                pool.nodes[name].send(signal.SIGSTOP)  # whoever asked them now would wait
            try:
                assert second.lookup("hit", TOKENS) == len(TOKENS)
                assert second.retrieve("hit", TOKENS, 20) == set()
            finally:
                for name in ("store-0", "master"):
                    pool.nodes[name].send(signal.SIGCONT)
            assert second.holds(TOKENS, 20)


def test_what_a_session_holds_is_not_evicted_from_the_servers_memory(pool: Pool, tmp_path: Path) -> None:
    with served(pool, tmp_path, cache=with_memory(12)) as server, Engine(server.url) as engine:
        store_surely(engine, TOKENS)
        local = server.models.backends[0].tiers[0].backend  # type: ignore[attr-defined]
        assert engine.lookup("held", TOKENS) == len(TOKENS)
        for index in range(10):
            engine.store(uuid.uuid4().hex, [index + 7] * 3 * CHUNK)
        model = next(iter(server.models))
        keys = model.database.keys(model.database.hash_tokens(TOKENS))
        assert [status.name for status in local.batched_contains(keys)] == ["OK"] * 4
        local.index.check_integrity()
        engine.scheduler.end_session("held")
        wait_for(lambda: not len(server.sessions))
        for index in range(10):
            engine.store(uuid.uuid4().hex, [index + 70] * 3 * CHUNK)
        assert [status.name for status in local.batched_contains(keys)] == ["MISSING"] * 4
        local.index.check_integrity()
