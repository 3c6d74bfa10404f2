"""What every `BlockCache` promises: the one in this process, the cache server's client, and the ranks of an
engine over either."""

import contextlib
import itertools
import random
import uuid

import pytest
import torch

from pd_cache.cache import CacheEngine
from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.paged.base import Slots
from pd_cache.reasons import Found, Loaded, StoreOutcome, TierChunks
from pd_cache.server.client import RemoteCache
from pd_cache.server.protocol import EngineIdentity
from pd_cache.tiers import open_backend
from tests.support.engines import BLOCK, BLOCKS, CHUNK
from tests.support.kv import holds_token, make_cache, write_prompt
from tests.support.server import LATE_S, PER_CHUNK, served
from transfer.deadlines import end_in

LONG = 3 * CHUNK + 5
WHOLE = list(range(3 * PER_CHUNK))
ELSEWHERE = list(range(20, 20 + len(WHOLE)))
_prompts = itertools.count(1)


class Side:
    """An engine with its cache, or one with its ranks, each of which has a part of every chunk."""

    def __init__(self, ranks, tensors, pool):
        self.ranks = ranks
        self.tensors = tensors
        self.layouts = [KVLayout.from_tensors(one) for one in tensors]
        self.pool = pool
        self.database: ChunkedTokenDatabase

    def names(self, tokens):
        return self.ranks[0].name_chunks(tokens)

    def compute(self, tokens, blocks=WHOLE):
        slots = [block * BLOCK + offset for block in blocks for offset in range(BLOCK)][: len(tokens)]
        for tensors, layout in zip(self.tensors, self.layouts, strict=True):
            write_prompt(tensors, layout, tokens[: len(slots)], slots)

    def holds(self, tokens, block, index):
        """Whether a block has the KV of the prompt's block `index`."""
        return all(
            holds_token(tensors, layout, tokens[: index * BLOCK + offset + 1], block * BLOCK + offset)
            for tensors, layout in zip(self.tensors, self.layouts, strict=True)
            for offset in range(BLOCK)
        )

    def find(self, names, **options):
        (answer,) = {rank.find(names, **options) for rank in self.ranks}
        return answer

    def store(self, names, blocks=WHOLE, **options):
        parts = [rank.store(names, blocks, **options) for rank in self.ranks]
        return [StoreOutcome.together(chunk) for chunk in zip(*parts, strict=True)]

    def load(self, names, blocks=WHOLE, **options):
        return min((rank.load(names, blocks, **options) for rank in self.ranks), key=lambda one: one.chunks)

    def changed(self, act):
        """The blocks that differ after `act`."""
        before = [[tensor.clone() for tensor in tensors] for tensors in self.tensors]
        act()
        different = set()
        for now, was in zip(itertools.chain(*self.tensors), itertools.chain(*before), strict=True):
            same = (now.view(torch.int16) == was.view(torch.int16)).flatten(1).all(dim=1)
            different.update(block for block, equal in enumerate(same.tolist()) if not equal)
        return sorted(different)

    def evict(self, names):
        self.pool.store.remove(self.database.keys(names), end_in(60), force=True)


def _tensors(ranks):
    return [make_cache(heads=4 // ranks, blocks=BLOCKS, block_size=BLOCK) for _ in range(ranks)]


@contextlib.contextmanager
def in_this_process(pool, folder, ranks, **settings):
    """The caches of this process, over backends of their own."""
    with contextlib.ExitStack() as stack:
        model, engines, tensors = uuid.uuid4().hex, [], _tensors(ranks)
        config = pool.settings(CacheConfig(chunk_size=CHUNK))
        for rank, cache in enumerate(tensors):
            layout = KVLayout.from_tensors(cache)
            metadata = CacheMetadata.of(model, layout, world_size=ranks, rank=rank)
            engine = CacheEngine(open_backend(config, layout.chunk_bytes(CHUNK)), config, metadata, layout)
            stack.callback(engine.close)
            engine.wait_available(60)
            engine.register_kv_caches(cache)
            engines.append(engine)
        side = Side(engines, tensors, engines[0].backend)
        side.database = engines[0].database
        yield side


@contextlib.contextmanager
def over_a_server(pool, folder, ranks):
    """The clients of a cache server."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(pool, folder))
        model, caches, tensors = uuid.uuid4().hex, [], _tensors(ranks)
        for rank, cache in enumerate(tensors):
            identity = EngineIdentity(
                model=model, block_size=BLOCK, chunk_size=CHUNK, world_size=ranks, rank=rank
            )
            one = RemoteCache(server.url, identity, lookup_timeout_s=LATE_S, move_timeout_s=LATE_S)
            stack.callback(one.close)
            one.register_kv_caches(cache)
            one.connection.wait_ready(60)
            caches.append(one)
        served_model = next(iter(server.models))
        served_model.mover.backend.wait_available(60)
        side = Side(caches, tensors, served_model.mover.backend)
        side.database = served_model.database
        yield side


KINDS = {
    "in this process": (in_this_process, 1),
    "two ranks in this process": (in_this_process, 2),
    "over a server": (over_a_server, 1),
    "two ranks over a server": (over_a_server, 2),
}


@pytest.fixture(scope="module", params=KINDS)
def side(request, pool, tmp_path_factory):
    opens, ranks = KINDS[request.param]
    with opens(pool, tmp_path_factory.mktemp("cache"), ranks) as one:
        yield one


@pytest.fixture
def tokens():
    """Three chunks and a tail that no other test uses."""
    first = 1000 * next(_prompts)
    return list(range(first, first + LONG))


@pytest.fixture
def stored(side, tokens):
    """The names of the three chunks, which are stored."""
    side.compute(tokens)
    side.store(names := side.names(tokens))
    return names


def test_what_is_stored_is_found_and_loaded_into_other_blocks(side, tokens):
    names = side.names(tokens)
    assert side.find(names) == Found(0, 0, "never_stored")
    side.compute(tokens)
    assert side.store(names) == [StoreOutcome.NEW] * 3
    assert side.store(names) == [StoreOutcome.BEFORE] * 3
    assert side.find(names) == Found(3, 3)
    assert side.changed(lambda: side.load(names, ELSEWHERE)) == ELSEWHERE
    assert all(side.holds(tokens, block, index) for index, block in enumerate(ELSEWHERE))
    assert side.load(names, ELSEWHERE) == Loaded(3, "none", TierChunks(pool=3))


def test_random_histories_agree_with_a_set_of_names(side):
    """Prompts that share prefixes are stored in part, evicted in part, looked up and loaded, and the blocks
    have the right bytes."""
    rng, root, stored = random.Random(5), 1000 * next(_prompts), set[bytes]()
    for _ in range(60):
        tokens = [root, *(rng.randrange(2) for _ in range(rng.randrange(4 * CHUNK)))]
        names = side.names(tokens)
        blocks = rng.sample(range(BLOCKS), len(names) * PER_CHUNK)
        at_hand = rng.randrange(len(names) + 1)
        expected = at_hand
        while expected < len(names) and names[expected] in stored:
            expected += 1
        found = side.find(names, chunks_at_hand=at_hand)
        assert (found.chunks, found.reason == "none") == (expected, expected == len(names))
        first, loaded = at_hand * PER_CHUNK, list[Loaded]()
        changed = side.changed(lambda: loaded.append(side.load(names[at_hand:], blocks[first:])))  # noqa: B023 - called at once
        assert loaded[0].chunks == expected - at_hand
        assert set(changed) <= set(blocks[first:]), "no block of another prompt"
        for index in range(first, expected * PER_CHUNK):
            assert side.holds(tokens, blocks[index], index)
        if rng.random() < 0.6:
            side.compute(tokens, blocks)
            outcomes = side.store(names[at_hand:], blocks[first:])
            assert [one is StoreOutcome.BEFORE for one in outcomes] == [
                name in stored for name in names[at_hand:]
            ]
            assert StoreOutcome.NOT not in outcomes
            stored.update(names[at_hand:])
        elif names and rng.random() < 0.5:
            victim = rng.choice(names)
            side.evict([victim])
            stored.discard(victim)


def test_a_hole_ends_the_prefix_and_the_load_although_later_chunks_are_there(side, stored):
    side.evict(stored[1:2])
    assert side.find(stored) == Found(1, 1, "evicted")
    assert side.find(stored, chunks_at_hand=2) == Found(3, 3)
    assert side.load(stored, ELSEWHERE) == Loaded(1, "evicted", TierChunks(pool=1))


def test_what_is_at_hand_is_neither_asked_for_nor_lost(side, tokens):
    names = side.names(tokens)
    assert side.find(names, chunks_at_hand=3) == Found(3, 3)
    assert side.find(names, chunks_at_hand=9) == Found(3, 3)
    assert side.find(names, chunks_at_hand=-1) == Found(0, 0, "never_stored")
    assert side.find([]) == Found(0, 0)
    assert side.find(names, chunks_at_hand=2) == Found(2, 2, "never_stored")


@pytest.mark.parametrize("left_out", [1, PER_CHUNK, 2 * PER_CHUNK + 1])
@pytest.mark.parametrize("end", ["start", "end"])
def test_blocks_that_a_load_leaves_out_stay_as_they_are(side, tokens, stored, left_out, end):
    left_out = left_out if end == "start" else min(left_out, PER_CHUNK - 1)
    kept = slice(left_out, None) if end == "start" else slice(None, len(ELSEWHERE) - left_out)
    blocks = [-1] * len(ELSEWHERE)
    blocks[kept] = ELSEWHERE[kept]
    assert side.changed(lambda: side.load(stored, blocks)) == ELSEWHERE[kept]
    assert all(side.holds(tokens, block, index) for index, block in enumerate(blocks) if block >= 0)


@pytest.mark.parametrize(
    "operation, blocks, message",
    [
        ("store", [0, 1], "not a whole number of chunks|3 chunk names"),
        ("store", [0, 1, 2], "not a whole number of chunks"),
        ("store", WHOLE[:-PER_CHUNK], "3 chunk names"),
        ("store", [-1, *WHOLE[1:]], "blocks must lie in"),
        ("store", [*WHOLE[:-1], BLOCKS], "blocks must lie in"),
        ("store", [*WHOLE[1:], WHOLE[1]], "named twice"),
        ("load", [0, -1, *WHOLE[2:]], "blocks must lie in"),
        ("load", [-2, *WHOLE[1:]], "blocks must lie in"),
        ("load", [*WHOLE[:-1], BLOCKS], "blocks must lie in"),
        ("load", [*WHOLE[1:], WHOLE[1]], "named twice"),
        ("load", [0.5, *WHOLE[1:]], "of integers"),
        ("load", [2**70, *WHOLE[1:]], "must be integers"),
        ("store", Slots(torch.arange(3 * CHUNK) + BLOCKS * BLOCK), "blocks must lie in"),
    ],
)
def test_places_that_do_not_fit_are_value_errors_before_anything_moves(
    side, tokens, operation, blocks, message
):
    names = side.names(tokens)
    for rank in side.ranks:
        with pytest.raises(ValueError, match=message):
            getattr(rank, operation)(names, blocks)
    assert side.find(names).chunks == 0


@pytest.mark.parametrize("names", [[b"n" * 16] * 2 + [b"n" * 15], [b"n" * 7] * 3, ["n" * 16] * 3])
def test_what_cannot_be_chunk_names_is_a_value_error(side, names):
    for rank in side.ranks:
        for call in (rank.find, lambda wrong, rank=rank: rank.store(wrong, WHOLE)):
            with pytest.raises(ValueError, match="chunk names must be"):
                call(names)


def test_a_prompt_is_named_by_tokens_or_by_hashes_and_not_by_both(side, tokens):
    for given in ((None, None), (tokens, [b"x" * 16])):
        with pytest.raises(ValueError, match="exactly one"):
            side.ranks[0].name_chunks(*given)
    assert side.names(tokens[: CHUNK - 1]) == []


def test_other_tensors_than_the_registered_ones_are_refused_if_they_do_not_fit(side, tokens):
    names = side.names(tokens)
    odd = make_cache(layers=3, blocks=BLOCKS, block_size=BLOCK)
    for rank in side.ranks:
        with pytest.raises(ValueError, match=r"built for|not the tensors that were registered"):
            rank.store(names, WHOLE, kv_caches=odd)


def test_a_session_may_end_whether_or_not_it_protects_anything(side, stored):
    for rank in side.ranks:
        assert rank.find(stored, session="a request").chunks == 3
        rank.end("a request")
        rank.end("never begun")
    assert side.load(stored, ELSEWHERE, session="a request").chunks == 3


def test_a_load_whose_time_is_over_loads_nothing_and_says_why(side, stored):
    late = side.load(stored, ELSEWHERE, timeout=0.0)
    assert late.chunks == 0
    assert late.reason in ("deadline", "no_staging", "server_down")


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_cache_finds_loads_and_stores_nothing_and_raises_nothing(kind, pool, tmp_path, tokens):
    opens, ranks = KINDS[kind]
    with opens(pool, tmp_path, ranks) as side:
        names = side.names(tokens)
        side.compute(tokens)
        side.store(names)
        for rank in side.ranks:
            rank.close()
            rank.close()
            assert not rank.available
            assert rank.find(names, chunks_at_hand=1).chunks == 1
            assert not any(rank.store(names, WHOLE, kv_caches=None) if isinstance(rank, RemoteCache) else [])
        assert side.changed(lambda: None) == []
