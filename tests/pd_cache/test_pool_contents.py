"""What a pool holds, from lists of its keys: what came and went, whatever else lies there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.kv_events import ClearedEvent, KvEvent, RemovedEvent, StoredEvent
from pd_cache.pool_contents import PoolContents, PoolListing
from pd_cache.tokens import ChunkedTokenDatabase, Namespace
from tests.support.proxy import NAMESPACE

OTHER = msgspec.structs.replace(NAMESPACE, model="other@1", shards=2)
SPACES = {space.fingerprint(): space for space in (NAMESPACE, OTHER)}
NAMES = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(12)]
ROOT = f"pdc1/epochs/{hashlib.sha256(NAMESPACE.model.encode()).hexdigest()[:16]}"


def keys(names: Sequence[bytes], space: Namespace = NAMESPACE, epoch: str = "") -> list[str]:
    return ChunkedTokenDatabase(space).all_shard_keys(names, epoch)


class Followed:
    """A pool's contents, and what one that only hears the events makes of them."""

    def __init__(self, most: int = 1000, spaces: dict[str, Namespace] = SPACES) -> None:
        self.contents = PoolContents(most)
        self.spaces = spaces
        self.heard: set[tuple[str | None, int | bytes]] = set()

    def listed(self, listed: Sequence[str]) -> list[KvEvent]:
        change = self.contents.compare(
            PoolListing([key.encode() for key in listed], self.contents.most_chunks), self.spaces
        )
        for event in change.events:
            if isinstance(event, ClearedEvent):
                self.heard = set()
                continue
            hashes = {(event.ownership, one) for one in event.block_hashes}
            self.heard = self.heard | hashes if isinstance(event, StoredEvent) else self.heard - hashes
        self.contents.commit(change)
        return change.events

    def names(self, space: Namespace = NAMESPACE) -> set[int | bytes]:
        return {name for owner, name in self.heard if owner == space.fingerprint()}


def test_events_say_what_came_and_what_went_in_vllms_words() -> None:
    pool = Followed()
    (came,) = pool.listed(keys(NAMES[:3]))
    assert isinstance(came, StoredEvent)
    assert sorted(came.block_hashes) == sorted(NAMES[:3])  # type: ignore[type-var]
    assert (came.medium, came.locality, came.ownership, came.block_size, came.parent_block_hash) == (
        "STORAGE", "REMOTE", NAMESPACE.fingerprint(), 256, None,
    )  # fmt: skip
    assert pool.listed(keys(NAMES[:3])) == [], "nothing changed"
    assert pool.listed(keys(NAMES[1:3])) == [
        RemovedEvent([NAMES[0]], "STORAGE", None, "REMOTE", NAMESPACE.fingerprint())
    ]


def test_a_chunk_is_there_if_all_its_shards_are() -> None:
    pool = Followed()
    pool.listed(keys(NAMES[:2], OTHER)[:-1])
    assert pool.names(OTHER) == {NAMES[0]}
    pool.listed(keys(NAMES[:2], OTHER))
    assert pool.names(OTHER) == set(NAMES[:2])
    pool.listed(keys(NAMES[:2], OTHER)[1:])
    assert pool.names(OTHER) == {NAMES[1]}


def test_without_a_namespaces_manifest_the_keys_themselves_say_how_many_shards_there_are() -> None:
    pool = Followed(spaces={})
    pool.listed([*keys(NAMES[:2], OTHER)[:-1], *keys(NAMES[:1])])
    assert (pool.names(OTHER), pool.names()) == ({NAMES[0]}, {NAMES[0]})


def test_a_reset_clears_all_and_what_other_models_have_is_said_again() -> None:
    pool, others = Followed(), keys(NAMES[:2], OTHER)
    pool.listed([*keys(NAMES[:3]), *others])
    events = pool.listed([*keys(NAMES[:3]), *others, ROOT, f"{ROOT}/0123abcd-1"])
    assert isinstance(events[0], ClearedEvent)
    assert (pool.names(), pool.names(OTHER)) == (set(), set(NAMES[:2]))
    pool.listed([*keys(NAMES[:3]), *others, ROOT, f"{ROOT}/0123abcd-1", *keys(NAMES[4:5], epoch="0123abcd-1")])
    assert pool.names() == {NAMES[4]}, "the new epoch's chunks"
    pool.listed([*others, ROOT, f"{ROOT}/0123abcd-1", f"{ROOT}/0123abcd-2", *keys(NAMES[4:5], epoch="0123abcd-1")])
    assert pool.names() == set(), "stored in the epoch before"


def test_while_no_sign_says_which_epoch_is_current_no_chunk_counts() -> None:
    pool = Followed()
    pool.listed(keys(NAMES[:3]))
    pool.listed([*keys(NAMES[:3]), ROOT])
    assert pool.names() == set()
    pool.listed([*keys(NAMES[:3]), ROOT, f"{ROOT}/0123abcd-1", f"{ROOT}/aaaaaaaa-9"])
    assert pool.names() == set(), "two runs: which of them the root names is not in a list of keys"


def test_a_namespace_whose_last_chunk_is_evicted_has_no_new_epoch() -> None:
    pool = Followed()
    pool.listed(keys(NAMES[:1]))
    assert [type(event) for event in pool.listed([])] == [RemovedEvent]
    assert [type(event) for event in pool.listed(keys(NAMES[:1]))] == [StoredEvent]


def test_what_is_no_chunk_is_left_out() -> None:
    pool = Followed()
    fingerprint = NAMESPACE.fingerprint()
    name = NAMES[0].hex()
    strange = ["", "x", "pdc1", "pdc1/", f"pdc1/{fingerprint}/manifest", f"pdc1/{fingerprint}/0/{'z' * 32}", f"pdc1/{fingerprint}/0/short",
               f"pdc2/{fingerprint}/0/{name}", f"pdc1/{fingerprint}/0/{name}/more", "pdc1/epochs/x/y", f"{ROOT}/noise", "pdc1/\xff/0/" + name]  # fmt: skip
    pool.listed(strange)
    assert pool.names() == set()
    pool.listed([*strange, f"pdc1/{fingerprint}/0/{name}"])
    assert pool.names() == {NAMES[0]}


def test_more_chunks_than_are_allowed_are_counted_and_left_out() -> None:
    listing = PoolListing([key.encode() for key in keys(NAMES)], 5)
    assert (sum(map(len, listing.shards.values())), listing.left_out) == (5, 7)


def test_what_an_engine_said_of_a_chunk_is_said_with_it_and_taken_back_with_it() -> None:
    """A router that knows blocks by an engine's hashes hears of the removal in the same hashes."""
    pool = Followed()
    hashes = [hashlib.sha256(bytes([99, number])).digest() for number in range(4)]
    told = StoredEvent(
        [*hashes], b"p" * 32, msgspec.Raw(b"\x92\x01\x02"), 64, None, "STORAGE", group_idx=0, locality="REMOTE"
    )
    pool.contents.learn(told)
    (event,) = pool.listed(keys([hashes[-1][:16]]))
    assert isinstance(event, StoredEvent)
    assert (event.block_hashes, event.parent_block_hash, bytes(event.token_ids), event.block_size) == (
        hashes, b"p" * 32, b"\x92\x01\x02", 64,
    )  # fmt: skip
    assert event.ownership == NAMESPACE.fingerprint()
    (gone,) = pool.listed([])
    assert isinstance(gone, RemovedEvent)
    assert gone.block_hashes == [hashes[-1][:16], *hashes], "a late subscriber heard only the name"
    assert not pool.contents._hashes, "nothing is remembered of what is gone"


def test_what_an_engine_says_after_the_chunk_was_listed_is_said_then() -> None:
    pool = Followed()
    last = hashlib.sha256(b"late").digest()
    assert len(pool.listed(keys([last[:16]]))) == 1
    pool.contents.learn(StoredEvent([last], None, msgspec.Raw(b"\x91\x01"), 64, medium="STORAGE"))
    (event,) = pool.listed(keys([last[:16]]))
    assert isinstance(event, StoredEvent)
    assert event.block_hashes == [last]
    assert pool.listed(keys([last[:16]])) == []


BLOCKS = [[hashlib.sha256(bytes([number, block])).digest() for block in range(3)] for number in range(4)]
_actions = st.lists(st.tuples(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.booleans()), max_size=8)


@given(_actions)
def test_who_hears_of_chunks_by_name_or_by_blocks_or_both_forgets_them_when_they_go(
    actions: list[tuple[set[int], set[int], bool]],
) -> None:
    """Each action: the chunks of which an engine tells, those of the next list, and whether another subscriber joins behind it."""
    pool = Followed()
    known: list[set[tuple[str | None, int | bytes]]] = [set()]
    for told, listed, joins in [*actions, (set(), set(), False)]:
        for number in told:
            pool.contents.learn(StoredEvent([*BLOCKS[number]], None, msgspec.Raw(b"\x91\x01"), 64, medium="STORAGE"))
        names = [BLOCKS[number][-1][:16] for number in listed]
        for event in pool.listed([*keys(names), *keys(names, OTHER)]):
            assert not isinstance(event, ClearedEvent)
            hashes = {(event.ownership, one) for one in event.block_hashes}
            known = [one | hashes if isinstance(event, StoredEvent) else one - hashes for one in known]
        for one in known:
            assert {(owner, str(name)) for owner, name in one if name in names} | {
                (owner, str(BLOCKS[number][-1][:16])) for owner, name in one for number in listed if name in BLOCKS[number]
            } == {(space, str(name)) for space in SPACES for name in names}, "in one way or the other"  # fmt: skip
        if joins:
            everything = pool.contents.everything(SPACES)
            known.append({(event.ownership, name) for event in everything if isinstance(event, StoredEvent) for name in event.block_hashes})  # fmt: skip
    assert not any(known), "the pool is empty"


def test_chunks_that_are_found_missing_before_the_next_list_are_removed_as_by_a_list() -> None:
    pool = Followed()
    pool.listed([*keys(NAMES[:4]), *keys(NAMES[:2], OTHER)])
    ours, other = ((space.fingerprint(), NAMES[1]) for space in (NAMESPACE, OTHER))
    assert sorted(pool.contents.named(NAMES[1])) == sorted([ours, other])
    assert pool.contents.keys(other, SPACES) == keys(NAMES[1:2], OTHER)
    assert pool.contents.keys((ours[0], NAMES[9]), SPACES) == []
    change = pool.contents.without([ours, (ours[0], NAMES[9])])
    assert [(event.ownership, event.block_hashes) for event in change.events if isinstance(event, RemovedEvent)] == [
        (ours[0], [NAMES[1]])
    ]
    pool.contents.commit(change)
    assert pool.contents.named(NAMES[1]) == [other]
    (back,) = pool.listed([*keys(NAMES[:4]), *keys(NAMES[:2], OTHER)])
    assert isinstance(back, StoredEvent), "if it is there after all, the next list says so"


def test_events_of_other_tiers_and_short_hashes_teach_nothing() -> None:
    pool = Followed()
    for event in (
        StoredEvent([b"x" * 32] * 2000, medium="STORAGE"),
        StoredEvent([b"x" * 32, b"x" * 16], medium="STORAGE"),
        StoredEvent([b"x" * 32], None, msgspec.Raw(msgspec.msgpack.encode(list(range(100_000)))), medium="STORAGE"),
        StoredEvent([5], medium="STORAGE"),
        StoredEvent([b"x" * 32], medium="GPU"),
        StoredEvent([], medium="STORAGE"),
    ):
        pool.contents.learn(event)
    assert not pool.contents._learned


_present = st.sets(st.sampled_from(range(12)))


@given(st.lists(st.tuples(_present, _present, st.integers(0, 2)), max_size=8))
def test_who_hears_all_events_knows_what_the_last_list_held(lists: list[tuple[set[int], set[int], int]]) -> None:
    pool, epoch = Followed(), 0
    for ours, others, resets in lists:
        epoch += resets
        label = f"0123abcd-{epoch}" if epoch else ""
        signs = [ROOT, *(f"{ROOT}/0123abcd-{number}" for number in range(1, epoch + 1))] if epoch else []
        pool.listed([*keys([NAMES[one] for one in ours], epoch=label), *keys([NAMES[one] for one in others], OTHER), *signs, *keys(NAMES[:3], epoch="ffffffff-1")])  # fmt: skip
        assert pool.names() == {NAMES[one] for one in ours}
        assert pool.names(OTHER) == {NAMES[one] for one in others}
        fresh = {(event.ownership, name) for event in pool.contents.everything(SPACES) if isinstance(event, StoredEvent) for name in event.block_hashes}  # fmt: skip
        assert fresh == pool.heard, "a late one gets the same"
