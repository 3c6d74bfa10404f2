"""CacheEngine over a real pool: its contract, its callers' mistakes, and objects that are not what they should be."""

from __future__ import annotations

import random
import struct
import uuid
from typing import Any

import pytest
import torch

from pd_cache.backends.objects import TRAILER_BYTES, seal
from pd_cache.config import CacheConfig
from pd_cache.engine import CacheEngineBuilder
from pd_cache.layout import KVLayout, PageKind
from pd_cache.tokens import CacheMetadata
from tests.support.engines import BLOCK, CHUNK, Host, host, random_slots
from tests.support.kv import holds_token, make_cache
from tests.support.pool import Pool

TOKENS = list(range(100, 129))  # three chunks and a tail of five


def loaded(node: Host, tokens: list[int], slots: list[int], mask: list[bool]) -> bool:
    return all(
        holds_token(node.cache, node.layout, tokens[: index + 1], slots[index])
        for index, is_loaded in enumerate(mask)
        if is_loaded
    )


@pytest.mark.parametrize("kind", PageKind)
def test_what_one_node_stores_another_retrieves_into_other_slots(pool: Pool, kind: PageKind) -> None:
    rng, model = random.Random(1), uuid.uuid4().hex
    with host(pool, model=model, kind=kind) as prefill, host(pool, model=model, kind=kind) as decode:
        slots = random_slots(rng, len(TOKENS), True)
        prefill.compute(TOKENS, slots)
        assert prefill.store(TOKENS, slots) == 24
        assert prefill.store(TOKENS, slots) == 0, "nothing is stored twice"
        assert decode.engine.lookup(TOKENS) == 24
        other = random_slots(rng, len(TOKENS), False)
        mask = decode.retrieve(TOKENS, other)
        assert mask == [True] * 24 + [False] * 5
        assert loaded(decode, TOKENS, other, mask)


def test_a_masked_prefix_is_neither_stored_nor_loaded(pool: Pool) -> None:
    with host(pool) as node:
        slots = list(range(len(TOKENS)))
        node.compute(TOKENS, slots)
        mask = [False] * 8 + [True] * 21
        assert node.store(TOKENS, slots, mask=torch.tensor(mask)) == 16
        assert node.engine.lookup(TOKENS) == 0, "the first chunk is a hole"
        assert node.engine.lookup(TOKENS, held=8) == 24, "unless the engine has it already"
        before = [tensor.clone() for tensor in node.cache]
        assert node.retrieve(TOKENS, slots, mask=mask) == [False] * 8 + [True] * 16 + [False] * 5
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, node.cache, strict=True))


def test_a_hole_ends_the_run_even_where_later_chunks_exist(pool: Pool) -> None:
    with host(pool) as node:
        slots = list(range(len(TOKENS)))
        node.compute(TOKENS, slots)
        node.store(TOKENS, slots)
        node.engine.backend.batched_remove(node.keys(TOKENS)[1:2])
        assert node.engine.lookup(TOKENS) == 8
        assert node.retrieve(TOKENS, slots) == [True] * 8 + [False] * 21


def test_extra_keys_keep_tenants_apart(pool: Pool) -> None:
    with host(pool) as node:
        slots = list(range(len(TOKENS)))
        node.compute(TOKENS, slots)
        node.store(TOKENS, slots, extra_keys=("salt", "a"))
        assert node.engine.lookup(TOKENS, extra_keys=("salt", "a")) == 24
        assert node.engine.lookup(TOKENS, extra_keys=("salt", "b")) == 0
        assert node.engine.lookup(TOKENS) == 0
        assert not any(node.retrieve(TOKENS, slots))


def test_hash_mode_works_from_block_hashes_alone(pool: Pool) -> None:
    with host(pool, cache=CacheConfig(chunk_size=CHUNK, hash_mode="blocks")) as node:
        hashes = [bytes([index]) * 16 for index in range(5)]  # five blocks: two chunks and half a chunk
        slots = torch.arange(20)
        node.compute(TOKENS[:20], slots.tolist())
        options: dict[str, Any] = {"hashes": hashes, "kv_caches": node.cache, "slot_mapping": slots}
        assert node.engine.store(**options) == 16
        assert node.engine.lookup(hashes=hashes) == 16
        assert node.engine.retrieve(**options).tolist() == [True] * 16 + [False] * 4


def test_prompts_longer_than_the_staging_memory_pass_through_it(pool: Pool) -> None:
    tokens = list(range(200))
    with host(pool, staging_size="8KiB", prefault=True) as node:
        assert node.engine.backend.staging.slots == 2  # type: ignore[attr-defined]
        slots = random_slots(random.Random(2), 200, True)
        node.compute(tokens, slots)
        assert node.store(tokens, slots) == 200
        other = random_slots(random.Random(3), 200, True)
        mask = node.retrieve(tokens, other)
        assert mask == [True] * 200
        assert loaded(node, tokens, other, mask)


def test_the_manifest_lies_beside_the_chunks(pool: Pool, raw_client: Any) -> None:
    with host(pool) as node:
        node.store(TOKENS, list(range(len(TOKENS))))
        assert raw_client.get(node.engine.database.manifest_key) == node.engine.database.namespace.manifest()


def test_bytes_and_tokens_are_counted(pool: Pool) -> None:
    with host(pool) as node:
        slots = list(range(len(TOKENS)))
        node.store(TOKENS, slots)
        node.engine.lookup(TOKENS)
        node.retrieve(TOKENS, slots)
        value = node.engine.metrics.registry.get_sample_value
        assert value("pd_cache_tokens_total", {"op": "store", "outcome": "stored"}) == 24
        assert value("pd_cache_tokens_total", {"op": "lookup", "outcome": "hit"}) == 24
        assert value("pd_cache_tokens_total", {"op": "retrieve", "outcome": "loaded"}) == 24
        assert value("pd_cache_bytes_total", {"op": "retrieve"}) == 3 * node.layout.chunk_bytes(CHUNK)


# --- callers' mistakes -----------------------------------------------------------------------------------------------

LONG = len(TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "exactly one"),
        ({"hashes": [b"x" * 16]}, "exactly one"),
        ({"tokens": [1.5] * LONG}, "int32"),
        ({"slot_mapping": torch.arange(LONG - 1)}, "one slot for each of 29 tokens"),
        ({"slot_mapping": list(range(LONG))}, "must be a tensor"),
        ({"slot_mapping": torch.arange(LONG).float()}, "integers"),
        ({"slot_mapping": torch.arange(LONG) + 240}, "slots must lie in"),
        ({"slot_mapping": torch.zeros(LONG, dtype=torch.int64)}, "twice"),
        ({"mask": torch.ones(LONG - 1, dtype=torch.bool)}, "mask must be 29 booleans"),
        ({"mask": torch.ones(LONG)}, "mask must be 29 booleans"),
        ({"mask": [True] * 8 + [False] * (LONG - 8)}, "False prefix"),
        ({"mask": [False] * 7 + [True] * (LONG - 7)}, "False prefix"),
        ({"kv_caches": []}, "one tensor a layer"),
        ({"kv_caches": [1, 2]}, "one tensor a layer"),
        ({"kv_caches": make_cache(layers=3, blocks=64)}, "built for"),
        ({"kv_caches": make_cache(PageKind.MLA, blocks=64)}, "heads_first tensor has 4 dimensions|built for"),
        ({"kv_caches": [tensor.float() for tensor in make_cache(blocks=64)]}, "built for"),
        ({"kv_caches": [tensor.to("meta") for tensor in make_cache(blocks=64)]}, "meta"),
    ],
)
@pytest.mark.parametrize("operation", ["store", "retrieve"])
def test_callers_mistakes_are_value_errors_before_anything_moves(
    pool: Pool, operation: str, change: dict[str, Any], message: str
) -> None:
    with host(pool) as node:
        arguments = {"tokens": TOKENS, "kv_caches": node.cache, "slot_mapping": torch.arange(LONG), **change}
        before = [tensor.clone() for tensor in node.cache]
        with pytest.raises(ValueError, match=message):
            getattr(node.engine, operation)(**arguments)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, node.cache, strict=True))
        assert node.engine.lookup(TOKENS) == 0


def test_prompts_shorter_than_a_chunk_are_nothing_to_do(pool: Pool) -> None:
    with host(pool) as node:
        for tokens in ([], [1, 2, 3]):
            slots = list(range(len(tokens)))
            assert node.store(tokens, slots) == 0
            assert node.retrieve(tokens, slots) == [False] * len(tokens)
            assert node.engine.lookup(tokens) == 0


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


def test_the_builder_keeps_one_engine_per_instance(pool: Pool) -> None:
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
    assert engine.lookup(TOKENS) == 0, "after close an engine holds nothing"
    slots = torch.arange(len(TOKENS))
    cache = make_cache()
    assert engine.store(TOKENS, kv_caches=cache, slot_mapping=slots) == 0
    assert not engine.retrieve(TOKENS, kv_caches=cache, slot_mapping=slots).any()


# --- objects that are not what they should be ------------------------------------------------------------------------


def truncated(raw: bytes) -> bytes:
    return raw[:-100]


def empty_payload(raw: bytes) -> bytes:
    return raw[-TRAILER_BYTES:]


def flipped_bit(raw: bytes) -> bytes:
    return bytes([raw[0] ^ 1]) + raw[1:]


def flipped_trailer_bit(raw: bytes) -> bytes:
    return raw[:-TRAILER_BYTES] + flipped_bit(raw[-TRAILER_BYTES:])


def other_version(raw: bytes) -> bytes:
    trailer = bytearray(raw[-TRAILER_BYTES:])
    struct.pack_into("<H", trailer, 4, 2)
    return raw[:-TRAILER_BYTES] + bytes(trailer)


def longer(raw: bytes) -> bytes:
    return raw + raw


def somebody_elses(raw: bytes) -> bytes:
    buffer = memoryview(bytearray(raw))
    seal("pdc1/another/0/key", buffer, len(raw) - TRAILER_BYTES)
    return bytes(buffer)


def zeros(raw: bytes) -> bytes:
    return bytes(len(raw))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, "truncated"),
        (empty_payload, "truncated"),
        (flipped_bit, "corrupt"),
        (flipped_trailer_bit, "foreign"),
        (other_version, "other_version"),
        (longer, "other_size"),
        (somebody_elses, "foreign"),
        (zeros, "foreign"),
    ],
)
def test_a_planted_object_is_never_used_and_counted(pool: Pool, raw_client: Any, damage: Any, reason: str) -> None:
    with host(pool) as node:
        slots = list(range(len(TOKENS)))
        node.compute(TOKENS, slots)
        node.store(TOKENS, slots)
        victim = node.keys(TOKENS)[1]
        good = raw_client.get(victim)
        assert raw_client.upsert(victim, damage(good)) == 0
        before = [tensor.clone() for tensor in node.cache]
        other = list(range(64, 64 + len(TOKENS)))
        mask = node.retrieve(TOKENS, other)
        assert mask == [True] * 8 + [False] * 21
        assert loaded(node, TOKENS, other, mask)
        assert node.troubles("retrieve") == {reason: 1}
        for tensor, old in zip(node.cache, before, strict=True):  # the damaged chunk touched no slot
            blocks = slice((64 + 8) // BLOCK, None)
            assert torch.equal(tensor[blocks].view(torch.int16), old[blocks].view(torch.int16))


def test_a_pool_without_room_takes_what_it_can_and_counts_the_rest(tmp_path_factory: pytest.TempPathFactory) -> None:
    pool = Pool(tmp_path_factory.mktemp("small"), segment="16MiB")
    try:
        pool.start("master")  # nobody gives memory
        with host(pool) as node:
            assert node.store(TOKENS, list(range(len(TOKENS)))) == 0
            assert node.troubles("store") == {"no_space": 3}
            assert node.engine.available
    finally:
        pool.stop()
