"""How long a prefix is, of models whose layers do not all keep the KV of every token."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.chunks import ChunkedTokenDatabase, Namespace
from pd_cache.groups import LayerGroups
from pd_cache.lookup import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found
from transfer.errors import Status


def group(
    tail: int | None, *, shards: int = 1, chunk_size: int = 64, layers: str = "0", ahead: int = 0
) -> ChunkedTokenDatabase:
    return ChunkedTokenDatabase(
        Namespace(
            model="m",
            kv_dtype="bf16",
            layout="p",
            layers=1,
            block_size=16,
            page_bytes=64,
            chunk_size=chunk_size,
            shards=shards,
            hash_mode="blocks",
            group="" if tail is None else layers,
            keeps="" if tail is None else "something",
            tail=tail or 0,
            ahead=ahead,
        )
    )


def test_a_namespace_tells_its_group_and_is_read_back() -> None:
    one, other = group(1, layers="0"), group(1, layers="1")
    assert one.manifest_key != other.manifest_key
    for database in (one, other, group(None), group(0, ahead=1)):
        manifest = database.namespace.manifest()
        assert Namespace.read(manifest) == database.namespace
        assert (b'"group"' in manifest) == bool(database.namespace.group)
        assert (b'"ahead"' in manifest) == bool(database.namespace.ahead)
        assert set(database.namespace.described()["namespace"]) == set(json.loads(manifest)) - {"format"}


def test_the_keys_of_the_groups_differ_in_their_namespaces_only() -> None:
    groups = LayerGroups([group(0, layers="0", shards=2), group(1, layers="1", shards=2)])
    keys = groups.keys([b"a" * 16, b"b" * 16])
    assert len(set(keys)) == len(keys) == 2 * groups.keys_per_chunk
    assert [key.split("/", 2)[2] for key in keys[:4]] == [key.split("/", 2)[2] for key in keys[4:]]


def test_groups_share_a_chunk_size() -> None:
    with pytest.raises(ValueError, match="chunks of one size"):
        LayerGroups([group(0), group(1, chunk_size=128)])
    with pytest.raises(ValueError, match="chunks of one size"):
        LayerGroups([])


def test_a_prefix_ends_where_the_end_of_a_window_was_stored() -> None:
    groups = LayerGroups([group(0), group(2, layers="1")])
    full, window = [True] * 5, [False, True, True, False, True]
    assert groups.reach(full + window) == Found(3, 5)
    assert groups.reach([True, False, True, True, True, *window]) == Found(0, 1)
    assert groups.reach([True] * 5 + [True, False, False, False, False]) == Found(1, 5), (
        "what is shorter than the window"
    )
    assert groups.needed(0, 5) == [range(5), range(3, 5)]
    assert groups.needed(4, 5) == [range(4, 5), range(4, 5)]


def test_a_prefix_leaves_the_chunk_whose_name_is_that_of_a_draft_models_kv_before_it() -> None:
    groups = LayerGroups([group(0), group(0, layers="1", ahead=1)])
    assert groups.reach([True] * 5 + [False, True, True, True, True]) == Found(4, 4)
    assert groups.reach([True] * 5 + [True] * 5) == Found(4, 4), "whether or not something has the first name"
    assert groups.reach([True] * 3 + [False] * 2 + [False, True, True, True, True]) == Found(3, 3)
    assert groups.reach([True] * 5 + [False, True, False, True, True]) == Found(1, 1)
    assert groups.reach([True, False]) == Found(0, 0)
    assert groups.needed(0, 4) == [range(4), range(1, 5)]
    assert groups.needed(3, 4) == [range(3, 4), range(4, 5)]


@pytest.mark.parametrize("at_hand", [0, 2])
def test_a_lookup_of_which_all_is_there_leaves_that_chunk_too(at_hand: int) -> None:
    lookup = PrefixLookup(LayerGroups([group(0), group(0, layers="1", ahead=1)]), CacheMetrics())
    names = [bytes([n] * 16) for n in range(5)]
    assert lookup.judge(names, at_hand, [Status.OK] * 2 * (5 - at_hand), "").chunks == 4


def test_without_a_group_that_needs_every_chunk_nothing_says_that_prompts_parted() -> None:
    assert LayerGroups([group(1)]).reach([False, True, False, False]) == Found(2, 2)
    assert LayerGroups([group(1)]).reach([False, False]) == Found(0, 0)


@given(st.data())
def test_a_prefix_is_the_longest_of_which_all_that_is_needed_is_there(data: st.DataObject) -> None:
    tails = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4), label="tails")
    shards = data.draw(st.integers(1, 3), label="shards")
    chunks = data.draw(st.integers(0, 8), label="chunks")
    aheads = data.draw(st.lists(st.integers(0, 1), min_size=len(tails), max_size=len(tails)), label="aheads")
    groups = LayerGroups(
        [
            group(tail, shards=shards, layers=str(at), ahead=ahead)
            for at, (tail, ahead) in enumerate(zip(tails, aheads, strict=True))
        ]
    )
    size = len(tails) * shards * chunks
    present = data.draw(st.lists(st.booleans() | st.just(True), min_size=size, max_size=size), label="present")

    def there(at: int, chunk: int) -> bool:
        start = (at * chunks + chunk) * shards
        return chunk < chunks and all(present[start : start + shards])

    def restorable(end: int) -> bool:
        needed = groups.needed(0, end)
        return all(there(at, chunk) for at, chunks_of in enumerate(needed) for chunk in chunks_of)

    expected = max(end for end in range(chunks + 1) if restorable(end))
    assert groups.reach(present).chunks == expected
