"""Every lookup client agrees with the engine on every input."""

import contextlib
import random
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from pd_cache.lookup import BypassLookupClient, MooncakeLookupClient
from pd_cache.reasons import ChunkHistory
from pd_cache.server.client import RemoteCache, ServerLookupClient
from pd_cache.server.protocol import EngineIdentity
from tests.support.backends import count
from tests.support.engines import BLOCK, BLOCKS, CHUNK, host, random_slots
from tests.support.kv import make_cache
from tests.support.server import LATE_S, served
from tests.support.waiting import wait_for
from transfer.deadlines import end_in

CLIENTS = ("bypass", "mooncake", "server")


@contextmanager
def client_of(kind, node, pool):
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(_open(kind, node, pool, stack)))
        yield client
        client.close()  # and once more, by the stack


def _open(kind, node, pool, stack):
    config, metadata = node.engine.settings, node.engine.metadata
    if kind == "bypass":
        return BypassLookupClient(config, metadata, node.engine)
    if kind == "mooncake":
        direct = MooncakeLookupClient(config, metadata, pool.address)
        direct.store.wait_open(60)
        return direct
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = stack.enter_context(served(pool, folder, cache=config.cache))
    worker = RemoteCache(server.url, EngineIdentity.of(metadata, config.cache))
    stack.callback(worker.close)
    worker.register_kv_caches(make_cache(blocks=BLOCKS, block_size=BLOCK))
    worker.connection.wait_ready(60)  # from then on the server knows the model
    server.models.backends[0].wait_available(60)
    client = ServerLookupClient(config, metadata, server.url, LATE_S)
    wait_for(lambda: client.available)
    return client


@pytest.fixture(scope="module")
def node(pool):
    with host(pool) as one:
        yield one


@pytest.fixture(params=CLIENTS)
def clients(request, pool):
    return lambda node: client_of(request.param, node, pool)


def test_it_agrees_with_the_engine_on_random_prompts_with_holes(clients, node):
    rng = random.Random(5)
    with clients(node) as client:
        for _ in range(30):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(60))]
            if rng.random() < 0.6:
                node.store(tokens, random_slots(rng, len(tokens)))
            if rng.random() < 0.3 and len(tokens) >= CHUNK:
                keys = node.keys(tokens)
                node.engine.backend.store.remove([rng.choice(keys)], end_in(60), force=True)
            for at_hand in (0, 5, 8, 17, 1000):
                expected = node.lookup(tokens, at_hand=at_hand)
                assert client.lookup(tokens, uuid.uuid4().hex, at_hand=at_hand) == expected


def test_extra_keys_reach_the_hash(clients, node):
    tokens = list(range(100, 120))
    with clients(node) as client:
        node.store(tokens, list(range(20)), extra_keys=("salt", "x"))
        assert client.lookup(tokens) == 0
        assert client.lookup(tokens, request_configs={"extra_keys": ("salt", "x")}) == 16
        assert client.lookup(tokens, request_configs={"extra_keys": ("salt", "y")}) == 0


def test_block_hashes_are_taken_in_hash_mode(clients, pool):
    import torch

    hashes = [bytes([index]) * 32 for index in range(4)]
    with host(pool, cache=CacheConfig(chunk_size=CHUNK, hash_mode="blocks")) as node, clients(node) as client:
        moved = {"hashes": hashes[:2], "kv_caches": node.cache, "slot_mapping": torch.arange(8)}
        assert node.prompts.store(**moved) == 8
        assert node.prompts.retrieve(**moved).all()
        assert client.lookup(block_hashes=hashes) == 8
        assert client.lookup([1] * 16) == 0, "tokens cannot be named in hash mode: an error, and errors are 0"


MISTAKES = (
    {"token_ids": None},
    {"token_ids": [1.5] * 8},
    {"token_ids": ["x"] * 8},
    {"token_ids": [2**40] * 8},
    {"token_ids": [1] * 8, "block_hashes": [b"x" * 16] * 2},
    {"token_ids": [1] * 8, "request_configs": {"nonsense": 1}},
    {"token_ids": [1] * 8, "request_configs": {"extra_keys": 5}},
    {"token_ids": [1] * 8, "request_configs": {"extra_keys": "salt"}},
)


def test_errors_give_zero_and_are_counted(clients, node):
    with clients(node) as client:
        for number, arguments in enumerate(MISTAKES, start=1):
            assert client.lookup(**arguments) == 0
            assert count(client.metrics, "pd_cache_troubles_total") == number


def test_a_change_of_the_weights_is_a_miss_until_the_prompt_is_stored_with_the_new_ones(clients, pool):
    tokens, slots = list(range(300, 316)), list(range(16))
    model = uuid.uuid4().hex
    with host(pool, model=model) as node, host(pool) as other, clients(node) as client:
        node.store(tokens, slots)
        other.store(tokens, slots)
        assert client.lookup(tokens) == node.lookup(tokens) == 16
        client.reset()
        found = client.find(client._database.name_chunks(tokens))
        assert (found.chunks, found.reason) == (0, "weights_unnamed")
        client.reset("w1")
        assert client.lookup(tokens) == 0
        node.engine.reset("w1")
        assert not any(node.retrieve(tokens, slots))
        assert node.store(tokens, slots) == 16
        assert client.lookup(tokens) == node.lookup(tokens) == 16
        assert other.lookup(tokens) == 16, "of another model"
        with pytest.raises(ValueError, match="up to 64"):
            client.reset("not a label")


def test_a_client_for_another_namespace_than_its_engine_is_refused(pool):
    with host(pool) as node, host(pool) as other, pytest.raises(ValueError, match="the client was made for"):
        BypassLookupClient(node.engine.settings, other.engine.metadata, node.engine)


def test_after_close_a_lookup_answers_with_what_is_at_hand(clients, node):
    """An engine must not lose what it has because the pool did not answer."""
    tokens = list(range(400, 424))
    with clients(node) as client:
        node.store(tokens, list(range(24)))
        assert client.supports_producer_reuse()
        assert client.lookup(tokens, "r", at_hand=CHUNK) == 24
        client.close()
        assert client.lookup(tokens) == 0
        assert client.lookup(tokens, "r", at_hand=CHUNK + 3) == CHUNK
        assert client.lookup(tokens, "r", at_hand=1000) == 24


def test_a_renewal_counts_the_objects_that_the_pool_has_not_those_of_other_tiers(clients, pool):
    tokens = list(range(500, 524))
    tiers = (LocalTier(capacity="1MiB"), MooncakeTier())
    with host(pool, cache=CacheConfig(chunk_size=CHUNK, tiers=tiers)) as node, clients(node) as client:
        node.store(tokens, list(range(24)))
        node.engine.backend.tiers[-1].backend.store.remove(node.keys(tokens)[1:2], end_in(60), force=True)
        known = not isinstance(client, ServerLookupClient)
        assert client.renew(node.engine.name_chunks(tokens)) == (("", 2) if known else None)
        client.reset()
        assert client.renew(node.engine.name_chunks(tokens)) is None, "without a label, nothing has a key"


def test_a_chunk_that_the_engine_said_it_has_stored_counts_as_evicted_when_it_is_missing(pool, node):
    config, metadata = node.engine.settings, node.engine.metadata
    direct = MooncakeLookupClient(config, metadata, pool.address, history=ChunkHistory())
    with contextlib.closing(direct):
        direct.store.wait_open(60)
        for number, client in enumerate((direct, BypassLookupClient(config, metadata, node.engine))):
            names = node.engine.name_chunks([600 + number] * CHUNK)
            assert client.find(names).reason == "never_stored"
            client.stored(names)
            assert client.find(names).reason == "evicted"
