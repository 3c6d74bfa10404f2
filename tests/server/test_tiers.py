"""A cache server with memory of its own: what engines of one host get from each other."""

import contextlib
import uuid

from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from pd_cache.reasons import Found, Loaded, StoreOutcome, TierChunks
from pd_cache.server.client import RemoteCache
from pd_cache.server.protocol import EngineIdentity
from tests.support.engines import BLOCK, BLOCKS, CHUNK
from tests.support.kv import make_cache
from tests.support.server import Engine, served, store_surely
from tests.support.waiting import wait_for
from transfer.deadlines import end_in
from transfer.errors import Status

TOKENS = list(range(4 * CHUNK))


def with_memory(chunks=64):
    """A local tier for about so many chunks (a page each) before the pool."""
    tiers = (LocalTier(capacity=4096 * chunks), MooncakeTier())
    return CacheConfig(chunk_size=CHUNK, tiers=tiers)


def test_what_a_session_holds_is_not_evicted_from_the_servers_memory(pool, tmp_path):
    with served(pool, tmp_path, cache=with_memory(12)) as server, Engine(server.url) as engine:
        store_surely(engine, TOKENS)
        local = server.models.backends[0].tiers[0].backend
        assert engine.lookup(TOKENS, "held") == len(TOKENS)
        for index in range(10):
            engine.store([index + 7] * 3 * CHUNK)
        model = next(iter(server.models))
        keys = model.database.keys(model.database.name_chunks(TOKENS))
        assert [status.name for status in local.batched_contains(keys)] == ["OK"] * 4
        local.index.check_integrity()
        engine.scheduler.end_session("held")
        wait_for(lambda: not server.sessions._sessions)
        for index in range(10):
            engine.store([index + 70] * 3 * CHUNK)
        assert [status.name for status in local.batched_contains(keys)] == ["MISSING"] * 4
        local.index.check_integrity()


def test_a_server_says_why_a_prefix_ends_and_which_tiers_were_read(pool, tmp_path):
    tensors = make_cache(blocks=BLOCKS, block_size=BLOCK)
    identity = EngineIdentity(model=uuid.uuid4().hex, block_size=BLOCK, chunk_size=CHUNK)
    names, blocks = [bytes([number]) * 16 for number in range(4)], range(4 * CHUNK // BLOCK)
    with contextlib.ExitStack() as clients, contextlib.ExitStack() as servers:
        server = servers.enter_context(served(pool, tmp_path, cache=with_memory()))
        cache = RemoteCache(server.url, identity, lookup_timeout_s=60, move_timeout_s=60)
        clients.callback(cache.close)
        cache.connection.wait_ready(60)
        assert cache.find(names) == Found(0, 0, "not_asked"), "no worker has registered yet"
        cache.register_kv_caches(tensors)
        server.models.backends[0].wait_available(60)
        assert cache.find(names) == Found(0, 0, "never_stored")
        assert cache.store(names[:3], blocks[:-2]) == [StoreOutcome.NEW] * 3
        assert cache.find(names) == Found(3, 3, "never_stored", TierChunks(memory=3))
        assert cache.find(names, chunks_at_hand=2) == Found(3, 3, "never_stored", TierChunks(memory=1))
        assert cache.load(names[:3], blocks[:-2]) == Loaded(3, "none", TierChunks(memory=3))
        model = next(iter(server.models))
        memory, rest = (tier.backend for tier in model.mover.backend.tiers)
        keys = model.database.keys(names)
        assert memory.batched_remove(keys[1:3]) == [Status.OK] * 2
        assert cache.find(names) == Found(3, 3, "never_stored", TierChunks(memory=1)), (
            "the pool's are not counted"
        )
        assert cache.load(names[:3], blocks[:-2]) == Loaded(3, "none", TierChunks(memory=1, pool=2))
        assert memory.batched_remove(keys[2:3]) == [Status.OK], (
            "what was read from the pool is in memory again"
        )
        assert rest.store.remove(keys[2:3], end_in(60), force=True) == [Status.OK]
        assert cache.load(names[:3], blocks[:-2]) == Loaded(2, "evicted", TierChunks(memory=2))
        assert cache.find(names) == Found(2, 2, "evicted", TierChunks(memory=2))
        servers.close()
        assert cache.find(names).reason == "server_down"
