"""Layouts, slot plans and the CPU copier, against an oracle that moves one slot at a time."""

import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cache.errors import LayoutError
from pd_cache.layout import KVLayout, PageKind, checksum, shard_tensors
from pd_cache.paged import open_copier
from pd_cache.paged.base import Slots, plan
from tests.support.kv import KINDS_WITH_TOKENS, make_cache, token_view

CHUNK = 8


def canonical(cache, layout, slots):
    """The chunk object of `slots`, whole blocks, in the documented order: plane, block, then what a page
    holds."""
    blocks = torch.tensor(slots[:: layout.block_size]) // layout.block_size
    image = [layer.index_select(1 if layout.kind is PageKind.KV_OUTER else 0, blocks) for layer in cache]
    if layout.kind is PageKind.HEADS_LAST:
        image = [layer.transpose(1, 2) for layer in image]
    return torch.cat([layer.contiguous().view(torch.uint8).flatten() for layer in image])


@pytest.mark.parametrize("kind", KINDS_WITH_TOKENS)
@pytest.mark.parametrize("one_storage", [True, False])
@pytest.mark.parametrize("heads, dim", [(3, 8), (1, 1), (5, 3)])
@pytest.mark.parametrize("large_page", [0, sys.maxsize])
@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
def test_gather_and_scatter_match_the_oracle(
    kind, one_storage, heads, dim, large_page, step_bytes, monkeypatch
):
    """So does their checksum, however the pages are hashed and in however many steps they move."""
    monkeypatch.setattr("pd_cache.paged.cpu._LARGE_PAGE", large_page)
    monkeypatch.setattr("pd_cache.paged.cpu._STEP_BYTES", step_bytes)
    cache = make_cache(kind, heads=heads, dim=dim, one_storage=one_storage)
    layout = KVLayout.from_tensors(cache)
    if heads == 1 and kind is PageKind.HEADS_LAST:
        kind = PageKind.HEADS_FIRST  # of one head the two are the same
    assert layout.kind is kind
    copier = open_copier(cache, layout)
    rng = random.Random(str((kind, one_storage, heads, dim)))
    slots, elsewhere = (
        [block * 4 + offset for block in rng.sample(range(32), 4) for offset in range(4)] for _ in range(2)
    )
    chunks = plan(Slots(torch.tensor(slots)), layout, CHUNK)

    objects = [torch.zeros(layout.chunk_bytes(CHUNK), dtype=torch.uint8) for _ in chunks]
    for chunk, payload in zip(chunks, objects, strict=True):
        assert copier.gather(chunk, payload).wait() == checksum(payload.numpy().data)
    for index, payload in enumerate(objects):
        assert torch.equal(payload, canonical(cache, layout, slots[index * CHUNK : (index + 1) * CHUNK]))

    target = make_cache(kind, heads=heads, dim=dim, one_storage=one_storage)
    before = [tensor.clone() for tensor in target]
    destination = open_copier(target, layout)
    for chunk, payload in zip(plan(Slots(torch.tensor(elsewhere)), layout, CHUNK), objects, strict=True):
        assert destination.scatter(chunk, payload).wait() == checksum(payload.numpy().data)
    for slot in range(128):
        for layer in range(2):
            now = token_view(target[layer], kind, slot, 4)
            if slot in elsewhere:
                want = token_view(cache[layer], kind, slots[elsewhere.index(slot)], 4)
            else:
                want = token_view(before[layer], kind, slot, 4)
            assert torch.equal(now, want)


@given(st.lists(st.integers(0, 127), min_size=16, max_size=16, unique=True))
@settings(max_examples=50, deadline=None)
def test_whole_blocks_are_recognised_and_only_those(slots):
    layout = KVLayout.from_tensors(make_cache())
    starts = range(0, 16, 4)
    if all(slots[i] % 4 == 0 and slots[i : i + 4] == list(range(slots[i], slots[i] + 4)) for i in starts):
        assert torch.cat(plan(Slots(torch.tensor(slots)), layout, CHUNK)).tolist() == [
            slots[i] // 4 for i in starts
        ]
    else:
        with pytest.raises(ValueError, match="whole blocks of 4 tokens"):
            plan(Slots(torch.tensor(slots)), layout, CHUNK)


@pytest.mark.parametrize(
    "slots, message",
    [
        (torch.tensor([0.0] * 8), "integers"),
        (torch.zeros(2, 4, dtype=torch.int64), "1-D"),
        (torch.arange(7), "whole number of blocks"),
        (torch.arange(12), "whole number of chunks"),
        (torch.arange(124, 132), r"lie in \[0, 32\)"),
        (torch.arange(-4, 4), "whole blocks"),
        (torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), "twice"),
        (torch.tensor([0, 1, 2, 3, 7, 6, 5, 4]), "whole blocks"),
    ],
)
def test_slot_mappings_that_cannot_be_are_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        plan(Slots(slots), KVLayout.from_tensors(make_cache()), CHUNK)


def test_layouts_count_bytes_as_the_tensors_do():
    for kind in KINDS_WITH_TOKENS:
        cache = make_cache(kind)
        layout = KVLayout.from_tensors(cache)
        assert layout.blocks == 32
        assert layout.block_size == 4
        assert layout.block_bytes * 32 == sum(tensor.numel() * 2 for tensor in cache)
        assert layout.token_bytes * 4 == layout.block_bytes
        with pytest.raises(ValueError, match="multiple of block_size"):
            layout.chunk_bytes(6)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ([], "no KV tensors"),
        ([torch.zeros(3, 3)], "unknown layout"),
        ([torch.zeros(2, 2, 4, 3, 8)], "pass `kind`"),
        ([torch.zeros(4, 4, 8), torch.zeros(4, 4, 9)], "layer 1"),
        ([torch.zeros(4, 4, 8), torch.zeros(4, 4, 8, dtype=torch.float16)], "layer 1"),
        ([torch.zeros(4, 3, 4, 8).transpose(1, 3)], "not contiguous"),
        ([torch.zeros(0, 4, 8)], "none empty"),
    ],
)
def test_tensors_that_are_no_paged_cache_are_refused(tensors, message):
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_tensors(tensors)


def test_an_ambiguous_shape_is_settled_by_naming_the_kind():
    tensors = [torch.zeros(2, 2, 4, 3, 8)]
    assert KVLayout.from_tensors(tensors, PageKind.KV_OUTER).planes == 2
    assert KVLayout.from_tensors(tensors, PageKind.KV_INNER).planes == 1


def test_tensors_of_another_device_are_refused():
    tensors = make_cache()
    with pytest.raises(ValueError, match="meta"):
        open_copier([tensor.to("meta") for tensor in tensors], KVLayout.from_tensors(tensors))


@pytest.mark.parametrize("one_storage", [True, False])
@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    "slots, kept",
    [
        ([-1] * 4 + [20, 21, 22, 23], 1),
        ([20, 21, 22, 23] + [-1] * 4, 0),
    ],
)
def test_a_scatter_leaves_out_the_blocks_that_the_engine_has_and_those_behind_a_loads_end(
    one_storage, step_bytes, slots, kept, monkeypatch
):
    """Also if these are all that a step would write."""
    monkeypatch.setattr("pd_cache.paged.cpu._STEP_BYTES", step_bytes)
    cache = make_cache(one_storage=one_storage)
    layout = KVLayout.from_tensors(cache)
    payload = torch.zeros(layout.chunk_bytes(CHUNK), dtype=torch.uint8)
    copier = open_copier(cache, layout)
    (source,) = plan([0, 1], layout, CHUNK)
    copier.gather(source, payload).wait()
    before = [tensor.clone() for tensor in cache]

    (wanted,) = plan(Slots(torch.tensor(slots)), layout, CHUNK, may_leave_out="ends")
    assert copier.scatter(wanted, payload).wait() == checksum(payload.numpy().data)
    for now, was in zip(cache, before, strict=True):
        differs = now.view(torch.int16) != was.view(torch.int16)
        assert {int(block) for block in differs.flatten(1).any(dim=1).nonzero()} == {5}
        for index, slot in enumerate(slots[4 * kept : 4 * kept + 4]):
            source_slot = token_view(was, layout.kind, 4 * kept + index, 4)
            assert torch.equal(token_view(now, layout.kind, slot, 4), source_slot)


def test_a_store_leaves_out_nothing_at_its_end():
    with pytest.raises(ValueError, match="values from -1"):
        plan([5, -1], KVLayout.from_tensors(make_cache()), CHUNK, may_leave_out="start")


@pytest.mark.parametrize(
    "slots", [[-1] * 2 + list(range(6)), [0, 1, 2, 3] + [-1] * 4, [-2] * 4 + [0, 1, 2, 3]]
)
def test_only_whole_blocks_at_the_start_may_be_left_out(slots):
    layout = KVLayout.from_tensors(make_cache())
    with pytest.raises(ValueError, match=r"whole blocks|blocks must lie"):
        plan(Slots(torch.tensor(slots)), layout, CHUNK, may_leave_out="start")


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_shard_is_a_contiguous_slice_of_heads_of_each_page(count):
    cache = make_cache(heads=6)
    layout = KVLayout.from_tensors(cache)
    for views in shard_tensors(cache, count):
        assert KVLayout.from_tensors(views, PageKind.HEADS_FIRST) == layout.shard(count)
    assert layout.shard(count).page_bytes * count == layout.page_bytes


@pytest.mark.parametrize("kind", [kind for kind in KINDS_WITH_TOKENS if kind is not PageKind.HEADS_FIRST])
def test_pages_whose_heads_are_not_outermost_are_never_cut(kind):
    with pytest.raises(LayoutError, match="cannot be cut into 3 shards"):
        KVLayout.from_tensors(make_cache(kind)).shard(3)


def test_heads_that_do_not_divide_are_never_cut():
    with pytest.raises(LayoutError, match="3 KV heads cannot be cut into 2"):
        KVLayout.from_tensors(make_cache(heads=3)).shard(2)
