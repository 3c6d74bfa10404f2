"""CacheEngine over a real pool: its contract, its callers' mistakes, and objects that are not what they
should be."""

import itertools
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pd_cache.cache import CacheEngineBuilder, PromptCache
from pd_cache.chunks import CacheMetadata, LayerGroup
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout, shard_tensors
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, StoreOutcome, TierChunks
from tests.support.engines import BLOCK, CHUNK, host, random_slots
from tests.support.kv import make_cache, same_tensors, write_prompt
from tests.support.waiting import wait_for
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import Placement
from transfer.store import MooncakeStore

LONG = 29
"""Tokens of the prompts here: three chunks and a tail of five."""

_prompts = itertools.count()


@pytest.fixture(scope="module")
def shared_node(pool):
    with host(pool) as node:
        yield node


@pytest.fixture
def node(shared_node):
    """A host with nothing counted yet. Its pool is shared: prompts keep tests apart."""
    engine = shared_node.engine
    engine.metrics = engine.mover.metrics = CacheMetrics()
    return shared_node


@pytest.fixture
def tokens():
    """A prompt that no other test uses."""
    first = 1000 * next(_prompts)
    return list(range(first, first + LONG))


def test_prompts_longer_than_the_staging_memory_pass_through_it(pool):
    tokens = list(range(200))
    with host(pool, staging_size="8KiB", prefault=True) as node:
        assert node.engine.backend.staging.slots == 2
        slots = random_slots(random.Random(2), 200)
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 200
        other = random_slots(random.Random(3), 200)
        mask = node.retrieve(tokens, other)
        assert mask == [True] * 200
        assert node.holds(tokens, other[: sum(mask)])


def test_bytes_and_tokens_are_counted_and_the_manifest_lies_beside_the_chunks(node, tokens, pool):
    slots = list(range(len(tokens)))
    node.store(tokens, slots)
    node.lookup(tokens)
    node.retrieve(tokens, slots)
    value = node.engine.metrics.registry.get_sample_value
    assert value("pd_cache_tokens_total", {"op": "store", "outcome": "stored"}) == 24
    assert value("pd_cache_tokens_total", {"op": "lookup", "outcome": "hit"}) == 24
    assert value("pd_cache_tokens_total", {"op": "retrieve", "outcome": "loaded"}) == 24
    assert value("pd_cache_bytes_total", {"op": "retrieve"}) == 3 * node.layout.chunk_bytes(CHUNK)
    with pool.bare_client() as client:
        assert client.get(node.engine.database.manifest_key) == node.engine.database.namespace.manifest()


def test_close_waits_for_what_moves_and_touches_no_slot_afterwards(pool, tokens):
    model = uuid.uuid4().hex
    slots = list(range(LONG))
    with host(pool, model=model) as writer:
        writer.store(tokens, slots)
    with host(pool, model=model) as node:
        node.engine.backend.batch_size = 1
        inside, go_on = threading.Event(), threading.Event()
        (copier,) = node.engine._pages(node.cache).copiers
        scatter = copier.scatter

        def slow(*arguments):
            inside.set()
            go_on.wait(60)
            return scatter(*arguments)

        copier.scatter = slow
        with ThreadPoolExecutor(2) as threads:
            reading = threads.submit(node.retrieve, tokens, slots)
            assert inside.wait(60)
            closing = threads.submit(node.engine.close)
            wait_for(lambda: node.engine.mover.closed)
            assert closing.running(), "close() returned while chunks were being scattered"
            go_on.set()
            assert reading.result(60) == [True] * 8 + [False] * 21
        assert not any(node.retrieve(tokens, slots))


# --- callers' mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slot_mapping": torch.arange(LONG - 1)}, "one slot for each of 29 tokens"),
        ({"slot_mapping": list(range(LONG))}, "must be a tensor"),
        ({"slot_mapping": torch.zeros(LONG, dtype=torch.int64)}, "whole blocks"),
        ({"mask": torch.ones(LONG - 1, dtype=torch.bool)}, "mask must be 29 booleans"),
        ({"mask": [True] * 8 + [False] * (LONG - 8)}, "False prefix"),
        ({"mask": [False] * 7 + [True] * (LONG - 7)}, "False prefix"),
        ({"kv_caches": []}, "one tensor a layer"),
        ({"kv_caches": [tensor.float() for tensor in make_cache(blocks=64)]}, "built for"),
        ({"kv_caches": [tensor.to("meta") for tensor in make_cache(blocks=64)]}, "meta"),
    ],
)
@pytest.mark.parametrize("operation", ["store", "retrieve"])
def test_callers_mistakes_are_value_errors_before_anything_moves(node, tokens, operation, change, message):
    arguments = {"tokens": tokens, "kv_caches": node.cache, "slot_mapping": torch.arange(LONG), **change}
    before = [tensor.clone() for tensor in node.cache]
    with pytest.raises(ValueError, match=message):
        getattr(node.prompts, operation)(**arguments)
    assert same_tensors(before, node.cache)
    assert node.lookup(tokens) == 0


def test_an_engine_that_does_not_fit_its_metadata_is_refused(pool):
    layout = KVLayout.from_tensors(make_cache())
    with pytest.raises(ValueError, match="metadata says"):
        CacheEngineBuilder.get_or_create(
            "odd",
            pool.settings(CacheConfig(chunk_size=CHUNK)),
            CacheMetadata.of("m", KVLayout.from_tensors(make_cache(layers=3))),
            layout,
        )
    assert CacheEngineBuilder.get("odd") is None


def test_the_builder_keeps_one_engine_per_instance(pool, tokens):
    layout = KVLayout.from_tensors(make_cache())
    settings, metadata = pool.settings(CacheConfig(chunk_size=CHUNK)), CacheMetadata.of("m", layout)
    try:
        engine = CacheEngineBuilder.get_or_create("one", settings, metadata, layout)
        assert CacheEngineBuilder.get_or_create("one", settings, metadata, layout) is engine
        assert CacheEngineBuilder.get("one") is engine
        with pytest.raises(ValueError, match="other settings"):
            CacheEngineBuilder.get_or_create("one", settings, CacheMetadata.of("other", layout), layout)
    finally:
        CacheEngineBuilder.destroy("one")
    CacheEngineBuilder.destroy("one")
    assert CacheEngineBuilder.get("one") is None
    prompts = PromptCache(engine)
    assert prompts.lookup(tokens) == 0, "after close an engine holds nothing"
    slots = torch.arange(len(tokens))
    cache = make_cache()
    assert prompts.store(tokens, kv_caches=cache, slot_mapping=slots) == 0
    assert not prompts.retrieve(tokens, kv_caches=cache, slot_mapping=slots).any()


# --- objects that are not what they should be ---------------------------------------------------------------


def test_nodes_of_different_tensor_parallel_size_share_a_pool(pool, tokens):
    model, slots = uuid.uuid4().hex, list(range(LONG))
    whole = make_cache(heads=4, block_size=BLOCK)
    write_prompt(whole, KVLayout.from_tensors(whole), tokens, slots)
    halves = [[view.clone() for view in views] for views in shard_tensors(whole, 2)]
    before = [[layer[:6].clone() for layer in cache] for cache in (whole, *halves)]
    with (
        host(pool, model=model, tensors=halves[0], place={"world_size": 2, "rank": 0}) as first,
        host(pool, model=model, tensors=halves[1], place={"world_size": 2, "rank": 1}) as second,
        host(pool, model=model, tensors=whole, place={"shards_per_rank": 2}) as alone,
    ):
        nodes = (alone, first, second)
        assert len({node.engine.database.namespace for node in nodes}) == 1
        first.store(tokens, slots)
        assert alone.lookup(tokens) == 0, "half of a chunk is no chunk"
        assert second.store(tokens, slots) == 24
        assert alone.lookup(tokens) == first.lookup(tokens) == 24
        more = [token + 500 for token in tokens]
        assert alone.store(more, slots) == 24
        for node, prompt, was in zip(nodes, (tokens, more, more), before, strict=True):
            for layer in node.cache:
                layer.zero_()
            assert sum(node.retrieve(prompt, slots)) == 24
            assert same_tensors([layer[:6] for layer in node.cache], was)


def test_an_engine_without_kv_tensors_can_look_up_and_no_more(pool, tokens):
    with host(pool) as node:
        names = node.engine.name_chunks(tokens)
        assert node.engine.find(names, chunks_at_hand=2).chunks == 2
        with pytest.raises(ValueError, match="register_kv_caches first"):
            node.engine.store(names, list(range(6)))


def test_a_full_pool_is_counted_and_stores_go_on_when_there_is_room(make_pool, tokens):
    pool = make_pool(segment="16MiB").start()
    slots = list(range(LONG))
    settings = pool.settings(transfer={"staging_size": "16MiB"}).transfer
    with (
        host(pool) as node,
        MooncakeStore(settings, master=pool.address, placement=Placement(pin="hard")) as filler,
    ):
        memory = filler.staging(16 << 20)
        filler.wait_open(60)
        slot = memory.lease(time.monotonic() + 5)
        assert filler.start_put(["filler"], [slot], [slot.size], end_in(60)).results() == [Status.OK]
        slot.release()
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 0
        assert node.troubles("store") == {"no_space": 3}
        assert not any(node.retrieve(tokens, slots))
        assert node.engine.available, "a full pool is not a pool that is down"
        assert filler.remove(["filler"], end_in(60), force=True) == [Status.OK]
        assert node.store(tokens, slots) == 24
        memory.close()


def test_of_layers_that_need_only_the_ends_of_prefixes_blocks_can_be_left_out_of_a_store(pool):
    layers = LayerGroup(layers="0-1", keeps="the last 4 tokens", tail=1)
    with host(pool, place={"group": layers}) as node:
        engine, per_chunk = node.engine, CHUNK // BLOCK
        engine.register_kv_caches(node.cache)
        names = [b"a" * 16, b"b" * 16]
        held = [*range(2, 2 * per_chunk + 1)]
        assert engine.store(names, [-1, *held]) == [StoreOutcome.NEW] * 2
        fetched = list(engine.backend.batched_get(engine.database.keys(names)))
        first = (
            torch.frombuffer(fetched[0].payload, dtype=torch.uint8)
            .view(node.layout.planes, per_chunk, -1)
            .clone()
        )
        assert not first[:, 0].any(), "what is left out is zeros, and nobody else's bytes"
        assert first[:, 1:].any()
        for one in fetched:
            one.release()
        before = [tensor.clone() for tensor in node.cache]
        other = [*range(10, 10 + 2 * per_chunk)]
        assert engine.load(names, [-1, *other[1:]]).chunks == 2
        assert same_tensors([layer[other[1:]] for layer in node.cache], [layer[held] for layer in before])
        assert same_tensors(
            [layer[other[:1]] for layer in node.cache], [layer[other[:1]] for layer in before]
        )
        with pytest.raises(ValueError, match="blocks must lie"):
            engine.store(names, [2, -1, *held[1:]])
        assert engine.find([b"c" * 16, b"b" * 16]) == Found(2, 2, "none"), "the end of a prefix is enough"
        assert engine.find([b"a" * 16, b"c" * 16]) == Found(1, 1, "never_stored")


def test_only_a_node_that_stored_or_found_a_chunk_knows_that_it_was_evicted(pool, tokens):
    model = uuid.uuid4().hex
    with (
        host(pool, model=model) as storer,
        host(pool, model=model) as finder,
        host(pool, model=model) as stranger,
    ):
        names = storer.engine.name_chunks(tokens)
        assert storer.engine.find(names) == Found(0, 0, "never_stored")
        storer.compute(tokens, slots := [*range(LONG)])
        assert storer.store(tokens, slots) == 24
        assert finder.engine.find(names) == Found(3, 3, "none")
        gone = storer.engine.database.keys(names[1:])
        assert storer.engine.backend.store.remove(gone, end_in(60), force=True) == [Status.OK] * len(gone)
        assert storer.engine.find(names) == Found(1, 1, "evicted")
        assert finder.engine.find(names) == Found(1, 1, "evicted")
        assert stranger.engine.find(names) == Found(1, 1, "never_stored")
        loaded = finder.engine.load(names, [*range(3 * CHUNK // BLOCK)], kv_caches=finder.cache)
        assert loaded == Loaded(1, "evicted", TierChunks(pool=1))
