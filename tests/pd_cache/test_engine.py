"""CacheEngine over a real pool: its contract, its callers' mistakes, and objects that are not what they should be."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pd_cache.cache import CacheEngine, CacheEngineBuilder, EngineLookup, PromptCache
from pd_cache.chunks import CacheMetadata, LayerGroup
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout, shard_tensors
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, StoreOutcome, TierChunks
from pd_cache.tiers import open_backend
from pd_cache.versions import FIRST
from tests.support.engines import BLOCK, BLOCKS, CHUNK, Host, host, random_slots
from tests.support.kv import make_cache, write_prompt
from tests.support.pool import Pool
from tests.support.waiting import wait_for
from transfer.errors import Status
from transfer.settings import Placement
from transfer.store import MooncakeStore

LONG = 29
"""Tokens of the prompts here: three chunks and a tail of five."""

_prompts = itertools.count()


@pytest.fixture(scope="module")
def shared_node(pool: Pool) -> Iterator[Host]:
    with host(pool) as node:
        yield node


@pytest.fixture
def node(shared_node: Host) -> Host:
    """A host with nothing counted yet. Its pool is shared: prompts keep tests apart."""
    engine = shared_node.engine
    engine.metrics = engine.mover.metrics = engine.prefix.metrics = CacheMetrics()
    return shared_node


@pytest.fixture
def tokens() -> list[int]:
    """A prompt that no other test uses."""
    first = 1000 * next(_prompts)
    return list(range(first, first + LONG))


def test_prompts_longer_than_the_staging_memory_pass_through_it(pool: Pool) -> None:
    tokens = list(range(200))
    with host(pool, staging_size="8KiB", prefault=True) as node:
        assert node.engine.backend.staging.slots == 2  # type: ignore[attr-defined]
        slots = random_slots(random.Random(2), 200)
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 200
        other = random_slots(random.Random(3), 200)
        mask = node.retrieve(tokens, other)
        assert mask == [True] * 200
        assert node.holds(tokens, other[: sum(mask)])


def test_bytes_and_tokens_are_counted_and_the_manifest_lies_beside_the_chunks(node, tokens, raw_client):
    slots = list(range(len(tokens)))
    node.store(tokens, slots)
    node.lookup(tokens)
    node.retrieve(tokens, slots)
    value = node.engine.metrics.registry.get_sample_value
    assert value("pd_cache_tokens_total", {"op": "store", "outcome": "stored"}) == 24
    assert value("pd_cache_tokens_total", {"op": "lookup", "outcome": "hit"}) == 24
    assert value("pd_cache_tokens_total", {"op": "retrieve", "outcome": "loaded"}) == 24
    assert value("pd_cache_bytes_total", {"op": "retrieve"}) == 3 * node.layout.chunk_bytes(CHUNK)
    assert raw_client.get(node.engine.database.manifest_key) == node.engine.database.namespace.manifest()


def test_close_waits_for_what_moves_and_touches_no_slot_afterwards(pool: Pool, tokens: list[int]) -> None:
    model = uuid.uuid4().hex
    slots = list(range(LONG))
    with host(pool, model=model) as writer:
        writer.store(tokens, slots)
    with host(pool, model=model) as node:
        node.engine.backend.batch_size = 1
        inside, go_on = threading.Event(), threading.Event()
        (copier,) = node.engine._pages(node.cache).copiers
        scatter = copier.scatter

        def slow(*arguments: Any) -> Any:
            inside.set()
            go_on.wait(60)
            return scatter(*arguments)

        copier.scatter = slow  # type: ignore[method-assign]
        results: list[list[bool]] = []
        reader = threading.Thread(target=lambda: results.append(node.retrieve(tokens, slots)))
        reader.start()
        assert inside.wait(60)
        closer = threading.Thread(target=node.engine.close)
        closer.start()
        wait_for(lambda: node.engine.mover.closed)
        assert closer.is_alive(), "close() returned while chunks were being scattered"
        go_on.set()
        closer.join(60)
        reader.join(60)
        assert results == [[True] * 8 + [False] * 21]
        assert not any(node.retrieve(tokens, slots))


# --- callers' mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "exactly one"),
        ({"hashes": [b"x" * 16]}, "exactly one"),
        ({"slot_mapping": torch.arange(LONG - 1)}, "one slot for each of 29 tokens"),
        ({"slot_mapping": list(range(LONG))}, "must be a tensor"),
        ({"slot_mapping": torch.arange(LONG) + 240}, "blocks must lie in"),
        ({"slot_mapping": torch.zeros(LONG, dtype=torch.int64)}, "whole blocks"),
        ({"mask": torch.ones(LONG - 1, dtype=torch.bool)}, "mask must be 29 booleans"),
        ({"mask": [True] * 8 + [False] * (LONG - 8)}, "False prefix"),
        ({"mask": [False] * 7 + [True] * (LONG - 7)}, "False prefix"),
        ({"kv_caches": []}, "one tensor a layer"),
        ({"kv_caches": make_cache(layers=3, blocks=64)}, "built for"),
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
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, node.cache, strict=True))
    assert node.lookup(tokens) == 0


def test_an_engine_that_does_not_fit_its_metadata_is_refused(pool: Pool) -> None:
    layout = KVLayout.from_tensors(make_cache())
    with pytest.raises(ValueError, match="metadata says"):
        CacheEngineBuilder.get_or_create(
            "odd",
            pool.settings(CacheConfig(chunk_size=CHUNK)),
            CacheMetadata.of("m", KVLayout.from_tensors(make_cache(layers=3))),
            layout,
        )
    assert CacheEngineBuilder.get("odd") is None


def test_the_builder_keeps_one_engine_per_instance(pool: Pool, tokens: list[int]) -> None:
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


# --- objects that are not what they should be ------------------------------------------------------------------------


def test_nodes_of_different_tensor_parallel_size_share_a_pool(pool: Pool, tokens: list[int]) -> None:
    model, slots = uuid.uuid4().hex, list(range(LONG))
    settings = pool.settings(CacheConfig(chunk_size=CHUNK))
    whole = make_cache(heads=4, block_size=BLOCK)
    layout = KVLayout.from_tensors(whole)
    write_prompt(whole, layout, tokens, slots)
    halves = [[view.clone() for view in views] for views in shard_tensors(whole, 2)]

    def engine(cache: list[torch.Tensor], **place: int) -> CacheEngine:
        layout = KVLayout.from_tensors(cache)
        made = CacheEngine(
            open_backend(settings, layout.shard(place.get("shards_per_rank", 1)).chunk_bytes(CHUNK)),
            settings,
            CacheMetadata.of(model, layout, **place),
            layout,
        )
        stack.callback(made.close)
        made.wait_available(60)
        return made

    with contextlib.ExitStack() as stack:
        engines = [engine(half, world_size=2, rank=rank) for rank, half in enumerate(halves)]
        both = engine(whole, shards_per_rank=2)
        assert {one.database.namespace for one in engines} == {both.database.namespace}
        ranks, alone = [PromptCache(one) for one in engines], PromptCache(both)
        mapping = torch.tensor(slots)

        ranks[0].store(tokens, kv_caches=halves[0], slot_mapping=mapping)
        assert alone.lookup(tokens) == 0, "half of a chunk is no chunk"
        assert ranks[1].store(tokens, kv_caches=halves[1], slot_mapping=mapping) == 24
        assert alone.lookup(tokens) == ranks[0].lookup(tokens) == 24

        empty = [torch.zeros_like(layer) for layer in whole]
        assert int(alone.retrieve(tokens, kv_caches=empty, slot_mapping=mapping).sum()) == 24
        for now, was in zip(empty, whole, strict=True):
            assert torch.equal(now.view(torch.int16)[:6], was.view(torch.int16)[:6])

        more = [token + 500 for token in tokens]
        assert alone.store(more, kv_caches=whole, slot_mapping=mapping) == 24
        for rank, half in enumerate(halves):
            blank = [torch.zeros_like(layer) for layer in half]
            assert int(ranks[rank].retrieve(more, kv_caches=blank, slot_mapping=mapping).sum()) == 24
            for now, was in zip(blank, half, strict=True):
                assert torch.equal(now.view(torch.int16)[:6], was.view(torch.int16)[:6])


def test_an_engine_without_kv_tensors_can_look_up_and_no_more(pool: Pool, tokens: list[int]) -> None:
    with host(pool) as node:
        names = node.engine.name_chunks(tokens)
        assert node.engine.find(names, at_hand=2).chunks == 2
        with pytest.raises(ValueError, match="register_kv_caches first"):
            node.engine.store(names, list(range(6)))


def test_a_full_pool_is_counted_and_stores_go_on_when_there_is_room(make_pool, tokens):
    pool = make_pool(segment="16MiB").start()
    slots = list(range(LONG))
    settings = pool.settings(transfer={"staging_size": "16MiB"}).transfer
    with host(pool) as node, MooncakeStore(settings, master=pool.address, placement=Placement(pin="hard")) as filler:
        memory = filler.staging(16 << 20)
        filler.wait_open(60)
        slot = memory.lease(time.monotonic() + 5)
        assert slot is not None
        assert filler.start_put(["filler"], [slot], [slot.size], timeout=60).results() == [Status.OK]
        slot.release()
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 0
        assert node.troubles("store") == {"no_space": 3}
        assert not any(node.retrieve(tokens, slots))
        assert node.engine.available, "a full pool is not a pool that is down"
        assert filler.remove(["filler"], timeout=60, force=True) == [Status.OK]
        assert node.store(tokens, slots) == 24
        memory.close()


def test_of_layers_that_need_only_the_ends_of_prefixes_blocks_can_be_left_out_of_a_store(pool: Pool) -> None:
    layers = LayerGroup(layers="0-1", keeps="the last 4 tokens", tail=1)
    tensors = make_cache(blocks=BLOCKS, block_size=BLOCK)
    layout = KVLayout.from_tensors(tensors)
    settings = pool.settings(CacheConfig(chunk_size=CHUNK))
    metadata = CacheMetadata.of(uuid.uuid4().hex, layout, group=layers)
    instance, per_chunk = uuid.uuid4().hex, CHUNK // BLOCK
    engine = CacheEngineBuilder.get_or_create(instance, settings, metadata, layout)
    try:
        engine.wait_available(60)
        engine.register_kv_caches(tensors)
        names = [b"a" * 16, b"b" * 16]
        held = [*range(2, 2 * per_chunk + 1)]
        assert engine.store(names, [-1, *held]) == [StoreOutcome.NEW] * 2
        fetched = list(engine.backend.batched_get(engine.database.keys(names)))
        first = torch.frombuffer(fetched[0].payload, dtype=torch.uint8).view(layout.planes, per_chunk, -1).clone()
        assert not first[:, 0].any(), "what is left out is zeros, and nobody else's bytes"
        assert first[:, 1:].any()
        for one in fetched:
            one.release()
        bits = [tensor.view(torch.int16) for tensor in tensors]
        before = [one.clone() for one in bits]
        other = [*range(10, 10 + 2 * per_chunk)]
        assert engine.load(names, [-1, *other[1:]]).chunks == 2
        for now, old in zip(bits, before, strict=True):
            assert torch.equal(now[other[1:]], old[held])
            assert torch.equal(now[other[0]], old[other[0]])
        with pytest.raises(ValueError, match="blocks must lie"):
            engine.store(names, [2, -1, *held[1:]])
        groups = EngineLookup([engine])
        assert groups.find([b"c" * 16, b"b" * 16]) == Found(2, 2, "none", FIRST), "the end of a prefix is enough"
        assert groups.find([b"a" * 16, b"c" * 16]) == Found(1, 1, "never_stored", FIRST)
    finally:
        CacheEngineBuilder.destroy(instance)


def test_only_a_node_that_stored_or_found_a_chunk_knows_that_it_was_evicted(pool: Pool, tokens: list[int]) -> None:
    model = uuid.uuid4().hex
    with host(pool, model=model) as storer, host(pool, model=model) as finder, host(pool, model=model) as stranger:
        names = storer.engine.name_chunks(tokens)
        assert storer.engine.find(names) == Found(0, 0, "never_stored", FIRST)
        storer.compute(tokens, slots := [*range(LONG)])
        assert storer.store(tokens, slots) == 24
        assert finder.engine.find(names) == Found(3, 3, "none", FIRST)
        gone = storer.engine.database.keys(names[1:])
        assert storer.engine.backend.store.remove(gone, timeout=60, force=True) == [Status.OK] * len(gone)
        assert storer.engine.find(names) == Found(1, 1, "evicted", FIRST)
        assert finder.engine.find(names) == Found(1, 1, "evicted", FIRST)
        assert stranger.engine.find(names) == Found(1, 1, "never_stored", FIRST)
        loaded = finder.engine.load(names, [*range(3 * CHUNK // BLOCK)], kv_caches=finder.cache)
        assert loaded == Loaded(1, "evicted", TierChunks(pool=1))
