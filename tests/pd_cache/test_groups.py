"""How long a prefix is, of models whose layers do not all keep the KV of every token."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.chunks import Namespace
from pd_cache.groups import LayerGroups, longest_prefix
from tests.support.names import group
from transfer.errors import Status


def test_a_namespace_tells_its_group_and_is_read_back():
    one, other = group(1, layers="0"), group(1, layers="1")
    assert one.manifest_key != other.manifest_key
    for database in (one, other, group(None), group(0, ahead=1)):
        manifest = database.namespace.manifest()
        assert Namespace.read(manifest) == database.namespace
        assert (b'"group"' in manifest) == bool(database.namespace.group)
        assert (b'"ahead"' in manifest) == bool(database.namespace.ahead)
        assert set(database.namespace.described()["namespace"]) == set(json.loads(manifest)) - {"format"}


def test_the_keys_of_the_groups_differ_in_their_namespaces_only():
    groups = LayerGroups([group(0, layers="0", shards=2), group(1, layers="1", shards=2)])
    keys = groups.keys([b"a" * 16, b"b" * 16])
    assert len(set(keys)) == len(keys) == 2 * groups.keys_per_chunk
    assert [key.split("/", 2)[2] for key in keys[:4]] == [key.split("/", 2)[2] for key in keys[4:]]


def test_groups_share_a_chunk_size():
    with pytest.raises(ValueError, match="chunks of one size"):
        LayerGroups([group(0), group(1, chunk_size=128)])
    with pytest.raises(ValueError, match="chunks of one size"):
        LayerGroups([])


def test_a_prefix_needs_all_chunks_the_last_ones_or_those_named_one_later():
    groups = LayerGroups([group(0), group(2, layers="1"), group(0, layers="2", ahead=1)])
    assert groups.needed(0, 5) == [range(5), range(3, 5), range(1, 6)]
    assert groups.needed(4, 5) == [range(4, 5), range(4, 5), range(5, 6)]


@given(st.data())
def test_a_prefix_is_the_longest_of_which_all_that_is_needed_is_there(data):
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
    present = data.draw(
        st.lists(st.booleans() | st.just(True), min_size=size, max_size=size), label="present"
    )

    def there(at, chunk):
        start = (at * chunks + chunk) * shards
        return chunk < chunks and all(present[start : start + shards])

    def longest(tails_of):
        """The longest prefix of which all that the groups with these tails need is there."""

        def whole(end):
            needed = zip(groups.needed(0, end), tails, strict=True)
            return all(
                there(at, chunk) for at, (of, tail) in enumerate(needed) if tail in tails_of for chunk in of
            )

        return max(end for end in range(chunks + 1) if whole(end))

    reached = longest({*tails})
    found = longest_prefix(groups, [Status.OK if there else Status.MISSING for there in present])
    assert (found.chunks, found.leading) == (reached, longest({0}) if 0 in tails else reached)
