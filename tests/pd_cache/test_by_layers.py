"""Loads layer by layer: what has arrived counts only once all of it was checked, and every failure ends in "not loaded"."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch

from pd_cache.blocks import Restored, TierChunks
from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from pd_cache.mover import layer_parts
from tests.support.engines import BLOCK, CHUNK, Host, host
from tests.support.kv import holds_token, kv_of, token_view
from tests.support.pool import Pool
from transfer.bulk import Bulk
from transfer.settings import ByteSize

LAYERS = 2
PER_CHUNK = CHUNK // BLOCK
CHUNKS = 5
HERE, ELSEWHERE = range(CHUNKS * PER_CHUNK), range(20, 20 + CHUNKS * PER_CHUNK)

_prompts = itertools.count(1)


@pytest.fixture
def reader(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr("pd_cache.mover._PART_BYTES", 1)  # a layer at a time, however small it is
    with host(pool) as node:
        node.engine.register_kv_caches(node.cache)
        yield node


@pytest.fixture
def writer(reader: Host, pool: Pool) -> Iterator[Host]:
    with host(pool, model=reader.engine.metadata.model) as node:
        yield node


def slots(blocks: range) -> list[int]:
    return [block * BLOCK + offset for block in blocks for offset in range(BLOCK)]


def stored(writer: Host) -> list[int]:
    """Stores a prompt of `CHUNKS` chunks, which no other test uses, and returns it."""
    first = 1000 * next(_prompts)
    tokens = list(range(first, first + CHUNKS * CHUNK))
    writer.compute(tokens, slots(HERE))
    assert writer.store(tokens, slots(HERE)) == len(tokens)
    return tokens


def names(node: Host, tokens: list[int]) -> list[bytes]:
    return node.engine.database.hash_tokens(tokens)


def loading(node: Host, tokens: list[int], **options: Any) -> Generator[int, None, Restored]:
    return node.engine.restore_by_layers(names(node, tokens), list(ELSEWHERE), **options)


def ended(
    load: Generator[int, None, Restored], see: Callable[[int], None] = lambda _: None
) -> tuple[list[int], Restored]:
    """Returns what the load yielded, which `see` is called with at once, and what it returned."""
    arrived: list[int] = []
    while True:
        try:
            arrived.append(next(load))
            see(arrived[-1])
        except StopIteration as end:
            return arrived, end.value


def seeing(node: Host, tokens: list[int], chunks: int) -> Callable[[int], None]:
    """Returns a function that asserts that so many layers of the first chunks are in their places."""

    def see(arrived: int) -> None:
        for layer in range(arrived):
            for at, slot in enumerate(slots(ELSEWHERE)[: chunks * CHUNK]):
                view = token_view(node.cache[layer], node.layout.kind, slot, BLOCK)
                assert torch.equal(view, kv_of(tokens[: at + 1], layer, view.shape)), (layer, at)

    return see


def chunk_intact(node: Host, tokens: list[int], chunk: int) -> bool:
    places = slots(ELSEWHERE)
    return all(
        holds_token(node.cache, node.layout, tokens[: at + 1], places[at])
        for at in range(chunk * CHUNK, (chunk + 1) * CHUNK)
    )


def corrupt(pool: Pool, key: str, byte: int) -> None:
    with pool.bare_client() as client:
        value = bytearray(client.get(key))
        value[byte] ^= 1
        assert client.remove(key, True) == 0
        assert client.put(key, bytes(value)) == 0


def test_when_a_layer_is_said_to_have_arrived_its_pages_are_there_in_every_chunk(writer: Host, reader: Host) -> None:
    tokens = stored(writer)
    arrived, restored = ended(loading(reader, tokens), seeing(reader, tokens, CHUNKS))
    assert (arrived[0], arrived[-1]) == (1, LAYERS)
    assert restored == Restored(CHUNKS, "none", TierChunks(pool=CHUNKS))
    assert all(chunk_intact(reader, tokens, chunk) for chunk in range(CHUNKS))


def test_a_damaged_byte_anywhere_ends_the_prefix_before_its_chunk_and_the_object_goes(
    writer: Host, reader: Host, pool: Pool
) -> None:
    size = writer.layout.chunk_bytes(CHUNK)
    for byte in (0, size // LAYERS - 1, size // LAYERS, size - 1, size, size + 8, size + 16, size + 24, size + 31):
        tokens = stored(writer)
        corrupt(pool, writer.keys(tokens)[3], byte)
        _, restored = ended(loading(reader, tokens))
        assert (restored.chunks, restored.reason) == (3, "damaged"), byte
        assert all(chunk_intact(reader, tokens, chunk) for chunk in range(3))
        assert reader.lookup(tokens) == 3 * CHUNK, "the next store of it brings a good one"


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_an_object_that_goes_while_its_layers_are_read_is_not_loaded_unless_it_is_whole(
    writer: Host, reader: Host, pool: Pool, change: str
) -> None:
    """Mooncake goes on reading where the object was. Whatever is there now, the checksum decides."""
    tokens, other = stored(writer), stored(writer)
    key, another = writer.keys(tokens)[2], writer.keys(other)[2]
    load = loading(reader, tokens)
    assert next(load) == 1
    with pool.bare_client() as client:
        value = client.get(another)
        assert client.remove(key, True) == 0
        if change == "replaced":
            assert client.put(key, value) == 0
    _, restored = ended(load)
    assert restored.chunks in (2, CHUNKS)
    assert all(chunk_intact(reader, tokens, chunk) for chunk in range(restored.chunks))


def test_a_chunk_that_is_missing_ends_the_prefix(writer: Host, reader: Host, pool: Pool) -> None:
    tokens = stored(writer)
    with pool.bare_client() as client:
        assert client.remove(writer.keys(tokens)[1], True) == 0
    _, restored = ended(loading(reader, tokens), seeing(reader, tokens, 1))
    assert restored == Restored(1, "never_stored", TierChunks(pool=1))


def test_a_chunk_whose_layers_cannot_be_read_to_the_end_does_not_announce_those_of_the_others(
    writer: Host, reader: Host, pool: Pool
) -> None:
    tokens = stored(writer)
    key = writer.keys(tokens)[3]
    half = writer.layout.chunk_bytes(CHUNK) // LAYERS
    with pool.bare_client() as client:
        value = client.get(key)
        assert client.remove(key, True) == 0
        assert client.put(key, value[:half]) == 0, "its first layer is there"
    _, restored = ended(loading(reader, tokens), seeing(reader, tokens, 3))
    assert restored.chunks == 3


def test_an_object_of_another_size_is_damage(writer: Host, reader: Host, pool: Pool) -> None:
    size = writer.layout.chunk_bytes(CHUNK)
    for length in (size, size - 40, 10):
        tokens = stored(writer)
        key = writer.keys(tokens)[0]
        with pool.bare_client() as client:
            value = client.get(key)
            assert client.remove(key, True) == 0
            assert client.put(key, value[:length]) == 0
        _, restored = ended(loading(reader, tokens))
        assert (restored.chunks, restored.reason) == (0, "damaged")
        assert reader.lookup(tokens) == 0


def test_a_reset_while_layers_arrive_makes_the_load_fail(
    writer: Host, reader: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cache.epochs.FRESH_S", 0.0)
    tokens = stored(writer)
    epoch = reader.engine.survey(names(reader, tokens)).epoch
    load = loading(reader, tokens, epoch=epoch)
    assert next(load) == 1
    assert writer.engine.reset() is not None
    assert ended(load)[1] == Restored(0, "reset")


def test_a_load_whose_deadline_passes_between_layers_loads_nothing(
    writer: Host, reader: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = stored(writer)
    load = loading(reader, tokens, timeout=60.0)
    assert next(load) == 1
    monkeypatch.setattr("pd_cache.mover.Deadline.passed", property(lambda _: True))
    assert ended(load)[1] == Restored(0, "deadline")


def test_blocks_at_the_start_and_at_the_end_can_be_left_out(writer: Host, reader: Host) -> None:
    tokens = stored(writer)
    blocks = [-1, *list(ELSEWHERE)[1:-1], -1]
    for tensor in reader.cache:
        tensor.zero_()
    load = reader.engine.restore_by_layers(names(reader, tokens), blocks)
    assert ended(load)[1].chunks == CHUNKS
    assert all(chunk_intact(reader, tokens, chunk) for chunk in range(1, CHUNKS - 1))
    assert not any(tensor[block].any() for tensor in reader.cache for block in (ELSEWHERE[0], ELSEWHERE[-1]))


def test_two_loads_of_one_prompt_at_once_do_not_end_each_others_reads(writer: Host, reader: Host) -> None:
    tokens = stored(writer)
    first, second = loading(reader, tokens), loading(reader, tokens)
    assert (next(first), next(second)) == (1, 1)
    assert ended(first)[1].chunks == CHUNKS
    assert ended(second)[1].chunks == CHUNKS


def test_many_loads_at_once_with_little_memory_end_and_bring_the_right_bytes(
    writer: Host, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By layers and whole, of the same prompts and of others, with five slots for all of them."""
    model = writer.engine.metadata.model
    with host(pool, model=model, staging_size="32KiB") as node:
        node.engine.register_kv_caches(node.cache)
        prompts = [stored(writer) for _ in range(3)]
        wrong: list[str] = []

        def work(number: int) -> None:
            """Each thread has blocks of its own."""
            first = number * CHUNKS * PER_CHUNK
            blocks = list(range(first, first + CHUNKS * PER_CHUNK))
            for turn in range(12):
                tokens = prompts[(turn + number) % len(prompts)]
                chosen = names(node, tokens)
                if (turn + number) % 3:
                    _, restored = ended(node.engine.restore_by_layers(chosen, blocks, timeout=60.0))
                else:
                    restored = node.engine.restore(chosen, blocks, timeout=60.0)
                if restored.chunks < CHUNKS:
                    wrong.append(restored.reason)
                places = slots(range(blocks[0], blocks[-1] + 1))
                for at in range(restored.chunks * CHUNK):
                    if not holds_token(node.cache, node.layout, tokens[: at + 1], places[at]):
                        wrong.append(f"token {at}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert node.engine.backend.store._bulk.reads.keys == set()  # type: ignore[attr-defined]


def test_a_load_that_is_given_up_gives_everything_back(writer: Host, reader: Host) -> None:
    tokens = stored(writer)
    load = loading(reader, tokens)
    next(load)
    load.close()
    bulk: Bulk = reader.engine.backend.store._bulk  # type: ignore[attr-defined]
    assert ended(loading(reader, tokens))[1].chunks == CHUNKS
    assert bulk.reads.keys == set()
    assert reader.engine.backend.memory.pool.in_use == 0


def test_a_read_that_takes_longer_than_a_lease_renews_it(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cache.mover._PART_BYTES", 1)
    pool = make_pool(lease_ttl_ms=1000).start()
    one_at_a_time = CacheConfig(chunk_size=CHUNK, tiers=(MooncakeTier(pipelined=False),))
    with host(pool, cache=one_at_a_time) as node:
        node.engine.register_kv_caches(node.cache)
        tokens = stored(node)
        load = loading(node, tokens)
        assert next(load) == 1
        time.sleep(1.5)  # the master's clock, not ours: the leases of the begin are over
        assert ended(load)[1].chunks == CHUNKS


def test_tiers_of_ones_own_have_no_parts_so_that_nothing_is_loaded_by_layers(pool: Pool) -> None:
    cache = CacheConfig(chunk_size=CHUNK, tiers=(LocalTier(capacity=ByteSize(1 << 20)), MooncakeTier()))
    with host(pool, cache=cache) as node:
        node.engine.register_kv_caches(node.cache)
        assert not node.engine.restores_by_layers
    with host(pool) as node:
        node.engine.register_kv_caches(node.cache)
        assert node.engine.restores_by_layers


def test_layers_are_read_together_until_a_part_is_worth_a_transfer() -> None:
    assert layer_parts(4, 4 * (16 << 10)) == [range(layer, layer + 1) for layer in range(4)]
    assert layer_parts(4, 4 * (8 << 10)) == [range(2), range(2, 4)]
    assert layer_parts(3, 3 * (8 << 10)) == [range(2), range(2, 3)]
    assert layer_parts(4, 100) == [range(4)]
