"""Engines over a cache server and a real pool: what the adapters promise, and that what one engine asks keeps
no other waiting."""

import contextlib
import itertools
import threading
import time
import uuid

import msgspec
import pytest
import torch

from pd_cache.chunks import LayerGroup
from pd_cache.config import CacheConfig
from pd_cache.errors import CacheServerError, ServerRefusedError
from pd_cache.layout import PageKind, shard_tensors
from pd_cache.paged.base import Slots
from pd_cache.reasons import Found, StoreOutcome
from pd_cache.server import clients, lookups
from pd_cache.server import server as cache_server
from pd_cache.server.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from pd_cache.server.client import RemoteCache
from pd_cache.server.connection import server_welcome
from pd_cache.server.protocol import EngineIdentity, Retrieve, Store
from tests.support.engines import BLOCK, BLOCKS, CHUNK, troubles
from tests.support.kv import make_cache, same_tensors
from tests.support.server import (
    LATE_S,
    PER_CHUNK,
    Engine,
    move_unchecked,
    pinned_keys,
    served,
    store_surely,
)
from tests.support.waiting import wait_for
from transfer.deadlines import end_in

_prompts = itertools.count()


@pytest.fixture(scope="module")
def server(pool, tmp_path_factory):
    with served(pool, tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def own_server(pool, tmp_path):
    """For tests with chunks of other sizes: a server opens a backend for each."""
    with served(pool, tmp_path) as one:
        yield one


# the server's backend, which it opens for its first engine, is no test's
@pytest.fixture(scope="module", autouse=True)
def shared_engine(server):
    with Engine(server.url) as engine:
        store_surely(engine, list(range(50_000, 50_000 + CHUNK)))
        yield engine


@pytest.fixture
def engine(shared_engine):
    """An engine that all tests of this module share, with nothing left to report."""
    shared_engine.worker.get_block_ids_with_load_errors()
    return shared_engine


@pytest.fixture
def tokens():
    """Three chunks and a tail that no other test uses."""
    first = 1000 * next(_prompts)
    return list(range(first, first + 3 * CHUNK + 5))


@pytest.fixture
def name():
    return uuid.uuid4().hex


# --- the scheduler's adapter --------------------------------------------------------------------------------


def test_a_lookup_is_submitted_once_and_forgotten_when_cleaned_up(engine, tokens, name):
    scheduler = engine.scheduler
    with pytest.raises(ValueError, match="no lookup was submitted"):
        scheduler.check_lookup_result(name)
    for wrong, message in [
        ({}, "exactly one"),
        ({"token_ids": tokens, "block_hashes": [b"x" * 16]}, "exactly one"),
        ({"block_hashes": [b"x" * 16]}, "names chunks by tokens, not by blocks"),
    ]:
        with pytest.raises(ValueError, match=message):
            scheduler.maybe_submit_lookup_request(name, **wrong)
    scheduler.maybe_submit_lookup_request("short", token_ids=[1] * (CHUNK - 1))
    assert scheduler.check_lookup_result("short") == 0
    scheduler.maybe_submit_lookup_request(name, token_ids=tokens)
    scheduler.maybe_submit_lookup_request(name, token_ids=[1.5])  # not even looked at
    wait_for(lambda: scheduler.check_lookup_result(name) == 0)
    engine.store(tokens)
    assert scheduler.check_lookup_result(name) == 0, "the answer to one lookup does not change"
    scheduler.cleanup_lookup_result(name)
    scheduler.cleanup_lookup_result(name)
    assert engine.lookup(tokens) == 3 * CHUNK
    assert scheduler.num_blocks_per_chunk() == engine.worker.num_blocks_per_chunk() == PER_CHUNK


# --- the worker's adapter -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, message",
    [
        (LoadStoreOp([0, 1]), "exactly one"),
        (LoadStoreOp([0, 1], token_ids=[1] * 8, block_hashes=[b"x" * 16] * 2), "exactly one"),
        (LoadStoreOp([0, 1], token_ids=[1] * 8, start=4, end=8), "multiple of 8"),
        (LoadStoreOp([0, 1], token_ids=[1] * 8, start=0, end=9), "must lie in order within the 8 tokens"),
        (LoadStoreOp([0], token_ids=[1] * 8, start=0, end=8), "lie in 2 blocks, got 1"),
        (LoadStoreOp([0], token_ids=[2**40] * 8, start=0, end=8), "int32"),
    ],
)
def test_an_op_that_does_not_fit_is_a_value_error_before_anything_moves(engine, op, message):
    names = {uuid.uuid4().hex for _ in range(3)}
    good, *bad = sorted(names)
    for submit in (engine.worker.submit_store_request, engine.worker.submit_retrieve_request):
        with pytest.raises(ValueError, match=message):
            submit(bad[0], op)
    with pytest.raises(ValueError, match=message):
        engine.worker.batched_submit_store_requests([good, bad[1]], [engine.op([1] * CHUNK), op])
    assert engine.worker.get_finished(names) == (names, set()), "nothing is under way"


def test_a_hole_makes_the_blocks_behind_it_bad_and_ends_the_session(
    server, engine, tokens, name, monkeypatch
):
    """In one turn, and in many."""
    model = next(model for model in server.models if model.group.model == engine.model)
    engine.store(tokens)
    keys = model.database.keys(model.database.name_chunks(tokens))
    before = pinned_keys(server)
    for turn in (1 << 30, 1):
        monkeypatch.setattr(clients, "TURN_BYTES", turn)
        engine.store(tokens)
        assert engine.lookup(tokens, name) == 3 * CHUNK
        assert engine.retrieve(tokens, 10, name) == set()
        assert engine.holds(tokens[: 3 * CHUNK], first_block=10)
        assert engine.lookup(tokens, name) == 3 * CHUNK
        model.mover.backend.store.remove([keys[1]], end_in(60), force=True)
        assert engine.retrieve(tokens, 20, name) == set(range(20 + PER_CHUNK, 20 + 3 * PER_CHUNK))
        assert engine.holds(tokens[:CHUNK], first_block=20)
        assert engine.worker.get_block_ids_with_load_errors() == set(), "bad blocks are reported once"
        assert pinned_keys(server) == before


def test_each_request_of_a_batch_ends_by_itself_with_its_own_bad_blocks(engine, tokens):
    good, bad, half = names = [uuid.uuid4().hex for _ in range(3)]
    prompts = [tokens[: 2 * CHUNK], [next(_prompts)] * CHUNK, tokens]
    engine.compute(prompts[0])
    engine.worker.batched_submit_store_requests([good], [engine.op(prompts[0])])
    assert engine.worker.get_finished({bad})[0] == {bad}, "a request that stored nothing is reported at once"
    engine.finish_store(good)
    ops = [engine.op(prompt, block) for prompt, block in zip(prompts, (20, 30, 40), strict=True)]
    engine.worker.batched_submit_retrieve_requests(names, ops)
    done = set()
    wait_for(lambda: done.update(engine.worker.get_finished(set())[1] or ()) or done == {good, bad, half})
    assert engine.worker.get_block_ids_with_load_errors() == {30, 31, 44, 45}
    assert engine.holds(tokens[: 2 * CHUNK], 20)
    assert engine.holds(tokens[: 2 * CHUNK], 40)


def test_a_request_is_told_once_when_its_last_store_has_ended(engine, tokens, name):
    engine.compute(tokens)
    for start in range(0, 3 * CHUNK, CHUNK):
        blocks = list(range(start // BLOCK, (start + CHUNK) // BLOCK))
        engine.worker.submit_store_request(
            name, LoadStoreOp(blocks, token_ids=tokens, start=start, end=start + CHUNK)
        )
    assert engine.worker.get_finished(set())[0] == set(), "the engine has not finished it"
    engine.finish_store(name)
    assert engine.lookup(tokens) == 3 * CHUNK
    assert engine.worker.get_finished({name})[0] == set(), "the engine reports it twice"
    engine.store([*tokens[1:], 5], request=name)  # it is reported again if it stores again
    assert engine.worker.get_finished({name})[0] == set()


# --- RemoteCache --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def caches(server, *identities, asking=None):
    """Workers of these engines, with tensors of their own, whose chunks the pool takes; before them a
    scheduler, if one is `asking`."""
    with contextlib.ExitStack() as stack:
        found = []
        if asking is not None:
            found.append(RemoteCache(server.url, asking, kind="scheduler", lookup_timeout_s=LATE_S))
            stack.callback(found[0].close)
            found[0].connection.wait_ready(LATE_S)
        for identity in identities:
            one = RemoteCache(server.url, identity, move_timeout_s=LATE_S, lookup_timeout_s=LATE_S)
            stack.callback(one.close)
            one.connection.wait_ready(LATE_S)
            one.register_kv_caches(make_cache(blocks=BLOCKS, block_size=BLOCK))
            found.append(one)
        for backend in server.models.backends:
            backend.wait_available(LATE_S)
        yield found


@pytest.fixture
def identity():
    return EngineIdentity(model=uuid.uuid4().hex, block_size=BLOCK, chunk_size=CHUNK)


@pytest.fixture
def cache(server, identity):
    with caches(server, identity) as (one,):
        yield one


WHOLE = list(range(3 * PER_CHUNK))


@pytest.mark.parametrize(
    "kind, blocks, message",
    [
        (Store, [-1, *WHOLE[1:]], "values from -1"),
        (Store, WHOLE[1:], "5 blocks are not a whole number of chunks"),
        (Retrieve, [-1, -1, *range(BLOCKS - 3, BLOCKS + 1)], f"to {BLOCKS}"),
    ],
)
def test_blocks_are_checked_by_the_server_too(engine, kind, blocks, message):
    before = [tensor.clone() for tensor in engine.cache]
    cache = engine.worker._cache
    with pytest.raises(ServerRefusedError, match=message) as refused:
        move_unchecked(cache.connection, kind, [bytes([number]) * 16 for number in range(3)], blocks)
    assert refused.value.reason == "invalid"
    assert same_tensors(engine.cache, before)


def test_a_mistake_takes_no_ticket_and_counts_nothing(cache, tokens):
    for places, message in (
        (Slots(torch.arange(1, 3 * CHUNK + 1)), "whole blocks"),
        ([0, 1], "3 chunk names"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.store(cache.name_chunks(tokens), places)
    assert not cache.connection.fence._taken
    assert ("tokens", "store", "requested") not in {
        key for key, value in cache.metrics.totals().items() if value
    }


def test_a_load_that_is_under_way_when_its_cache_closes_ends_and_the_closed_cache_has_nothing(cache, tokens):
    names = cache.name_chunks(tokens)
    assert all(cache.store(names, WHOLE))
    pending = cache.begin_retrieve(names, WHOLE)
    cache.close()
    assert pending.wait().chunks in (0, 3)
    assert pending.query()
    assert cache.find(names).chunks == 0
    assert not any(cache.store(names, WHOLE))


# --- several groups of layers -------------------------------------------------------------------------------

NAMES = [bytes([number]) * 16 for number in range(5)]


def test_a_lookup_asks_for_all_groups_of_layers_and_pins_what_a_load_needs_of_each(own_server, identity):
    """Each group has a connection of its own for its tensors; a scheduler has one for all."""
    full = LayerGroup(layers="0-1", keeps="every token", tail=0)
    window = LayerGroup(layers="2-4", keeps="the last tokens", tail=2)
    whole = msgspec.structs.replace(identity, layers=full)
    ends = msgspec.structs.replace(identity, layers=window, shards_per_rank=3)
    asking = msgspec.structs.replace(whole, further=(ends,))
    with caches(own_server, whole, ends, asking=asking) as (scheduler, first, second):
        before = pinned_keys(own_server)
        assert first.store(NAMES, range(5 * PER_CHUNK)) == [StoreOutcome.NEW] * 5
        assert scheduler.find(NAMES) == Found(0, 5, "no_tail")
        end = [-1, *range(1, 2 * PER_CHUNK)]
        assert second.store(NAMES[2:4], end) == [StoreOutcome.NEW] * 2
        with pytest.raises(ValueError, match="blocks must lie"):
            first.store(NAMES[:2], end)
        assert scheduler.find(NAMES, session="a") == Found(4, 5, "no_tail")
        assert pinned_keys(own_server) == before + 4 + 2 * 3
        assert scheduler.find(NAMES, chunks_at_hand=3) == Found(4, 5, "no_tail")
        into = range(20, 20 + 4 * PER_CHUNK)
        assert first.load(NAMES[:4], into, session="a").chunks == 4
        assert pinned_keys(own_server) == before + 2 * 3
        assert second.load(NAMES[2:4], [-1, *range(31, 30 + 2 * PER_CHUNK)], session="a").chunks == 2
        assert pinned_keys(own_server) == before
        for one in first._tensors:
            assert same_tensors([one[list(into)]], [one[: 4 * PER_CHUNK]])


def test_a_lookup_for_an_engine_with_a_draft_model_ends_a_chunk_earlier_and_pins_what_a_load_needs(
    own_server, identity
):
    """Nothing lies under the first name, and that is no hole."""
    drafter = LayerGroup(layers="2", keeps="every token, for drafts", tail=0, ahead=1)
    drafts = msgspec.structs.replace(identity, layers=drafter)
    asking = msgspec.structs.replace(identity, further=(drafts,))
    with caches(own_server, identity, drafts, asking=asking) as (scheduler, own, other):
        assert own.store(NAMES, range(5 * PER_CHUNK)) == [StoreOutcome.NEW] * 5
        assert scheduler.find(NAMES).chunks == 0
        assert other.store(NAMES[1:], range(4 * PER_CHUNK)) == [StoreOutcome.NEW] * 4
        before = pinned_keys(own_server)
        assert scheduler.find(NAMES, session="a") == Found(4, 4, "none")
        assert pinned_keys(own_server) == before + 4 + 4
        assert scheduler.find(NAMES, chunks_at_hand=2) == Found(4, 4, "none")
        assert scheduler.find(NAMES[:3]) == Found(2, 2, "none")
        assert other.load(NAMES[1:], range(4 * PER_CHUNK), session="a").chunks == 4
        assert pinned_keys(own_server) == before + 4


# --- how chunks are named and sized -------------------------------------------------------------------------


def test_engines_choose_how_chunks_are_named_where_the_file_leaves_it_open(server, name):
    hashes, tokens = [bytes([index]) * 32 for index in range(6)], list(range(24))
    with Engine(server.url, name, hash_mode="blocks") as engine:
        engine.compute(tokens)
        engine.worker.submit_store_request("request", LoadStoreOp(list(range(6)), block_hashes=hashes))
        engine.finish_store()
        engine.scheduler.maybe_submit_lookup_request("b", block_hashes=[*hashes, b"\xff" * 32, b"\xff" * 32])
        wait_for(lambda: engine.scheduler.check_lookup_result("b") == 24)
        engine.worker.submit_retrieve_request(
            "request", LoadStoreOp(list(range(10, 16)), block_hashes=hashes)
        )
        engine.finish_retrieve()
        assert engine.worker.get_block_ids_with_load_errors() == set()
        assert engine.holds(tokens, first_block=10)
        names = engine.worker._cache.name_chunks(None, hashes)
    seeded = EngineIdentity(model=name, block_size=BLOCK, hash_mode="blocks", hash_seed="b")
    with caches(server, seeded) as (other,):
        assert other.load(names, WHOLE).reason == "never_stored", "the same names mean other chunks"


def test_a_server_whose_file_leaves_the_size_of_chunks_open_serves_each_engine_with_its_own(pool, tmp_path):
    with served(pool, tmp_path, cache=CacheConfig()) as server:
        for size in (CHUNK, 3 * CHUNK):
            cache = RemoteCache(server.url, EngineIdentity(model="m", block_size=BLOCK, chunk_size=size))
            with contextlib.closing(cache):
                cache.connection.wait_ready(LATE_S)
                assert cache.chunk_size == size
        assert server_welcome(server.url, LATE_S).may_size


# --- shards -------------------------------------------------------------------------------------------------


def test_engines_of_different_tensor_parallel_size_share_chunks(server, tokens):
    model = uuid.uuid4().hex
    # a half is as large as the chunks of the other tests
    whole = make_cache(heads=6, blocks=BLOCKS, block_size=BLOCK)
    halves = [[view.clone() for view in views] for views in shard_tensors(whole, 2)]
    blank = [torch.zeros_like(layer) for layer in whole]
    blocks = 3 * PER_CHUNK
    with (
        Engine(server.url, model, world_size=2, rank=0, cache=halves[0]) as first,
        Engine(server.url, model, world_size=2, rank=1, cache=halves[1]) as second,
        Engine(server.url, model, shards_per_rank=2, cache=blank) as alone,
    ):
        for rank in (first, second):
            assert alone.lookup(tokens) == 0
            rank.worker.submit_store_request("request", rank.op(tokens))
            rank.finish_store()
        assert alone.lookup(tokens) == 3 * CHUNK
        pinned = pinned_keys(server)
        assert alone.retrieve(tokens, 20) == set()
        assert pinned_keys(server) == pinned - 6, (
            "three chunks of two shards, all of which this rank has loaded"
        )
        assert same_tensors(
            [layer[20 : 20 + blocks] for layer in alone.cache], [layer[:blocks] for layer in whole]
        )

        longer = [*tokens[: 2 * CHUNK], *range(7_000_000, 7_000_000 + CHUNK)]
        alone.worker.submit_store_request("request", alone.op(longer, 20))
        alone.finish_store()
        assert first.lookup(longer) == 3 * CHUNK
        pinned = pinned_keys(server)
        for number, rank in enumerate((first, second)):
            assert pinned_keys(server) == pinned - 3 * number, (
                "the other rank's shards are still to be loaded"
            )
            assert rank.retrieve(longer, 40) == set()
            assert same_tensors(
                [one[40 : 40 + blocks] for one in rank.cache], [one[:blocks] for one in rank.cache]
            )
        assert pinned_keys(server) == pinned - 6


# --- refusals -----------------------------------------------------------------------------------------------


def adapter(kind, **options):
    return lambda url, model: kind(url, None, EngineIdentity(model=model, **options)).shutdown()


@pytest.mark.parametrize(
    "come, message",
    [
        (
            lambda url, model: Engine(url, model, shards_per_rank=2),
            "3 KV heads cannot be cut into 2 equal shards",
        ),
        (
            lambda url, model: Engine(url, model, cache=make_cache(PageKind.KV_OUTER)),
            "are not interchangeable",
        ),
        (
            adapter(SchedulerAdapter, block_size=3),
            "have 8 tokens, which is not a multiple of the engine's block size 3",
        ),
        (
            adapter(WorkerAdapter, block_size=3),
            "have 8 tokens, which is not a multiple of the engine's block size 3",
        ),
        (
            lambda url, model: Engine(url, model, cache=make_cache(block_size=BLOCK // 2)),
            f"blocks of {BLOCK // 2} tokens, the engine said {BLOCK}",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_in_words(engine, come, message):
    with pytest.raises(ServerRefusedError, match=message):
        come(engine.worker._cache.connection.url, engine.model)


def test_a_chunk_size_other_than_the_servers_leaves_an_engine_without_a_cache(
    pool, tmp_path, tokens, monkeypatch
):
    monkeypatch.setattr("pd_cache.server.connection._REGISTER_S", 3600.0)
    message = f"{CHUNK} tokens, this engine was made for {2 * CHUNK}"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(pool, tmp_path))
        engine = stack.enter_context(Engine(server.url, chunk_size=2 * CHUNK, register=False))
        connection = engine.worker._cache.connection
        for refused in (
            lambda: connection.wait_ready(60),
            lambda: engine.worker.register_kv_caches(engine.tensors),
        ):
            with pytest.raises(ServerRefusedError, match=message):
                refused()
        assert not engine.worker.available
        assert engine.lookup(tokens) == 0
        server.close()
        wait_for(lambda: not connection._connected)
        engine.worker.register_kv_caches(engine.tensors)  # does not wait for a server that has gone away
        assert not engine.worker.available


def test_without_a_server_a_constructor_that_needs_it_says_so_and_one_that_does_not_goes_on(tmp_path):
    url = f"ipc://{tmp_path}/nobody.sock"
    with pytest.raises(CacheServerError, match=r"no cache server answered at ipc://.* within 0.2 s"):
        SchedulerAdapter(url, None, EngineIdentity(model="m", block_size=4), connect_timeout_s=0.2)
    with Engine(url, chunk_size=CHUNK) as engine:
        tokens = list(range(CHUNK))
        assert engine.lookup(tokens) == 0
        engine.store(tokens)
        assert set(troubles(engine.worker.metrics, "store")) == {"server_lost"}
        assert engine.retrieve(tokens) == {0, 1}
        assert set(troubles(engine.scheduler.metrics, "lookup")) == {"server_lost"}, (
            "an outage is no plain miss"
        )


def test_a_full_queue_is_busy_and_busy_is_a_miss(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_server, "MAX_IN_FLIGHT", 2)
    with served(pool, tmp_path, threads=2) as server, Engine(server.url) as engine:
        tokens = list(range(CHUNK))
        store_surely(engine, tokens)
        go_on = threading.Event()
        backend = server.models.backends[0]
        ask = backend.batched_contains
        backend.batched_contains = lambda *a, **k: (go_on.wait(60), ask(*a, **k))[1]
        try:
            names = [uuid.uuid4().hex for _ in range(4)]
            for one in names:
                engine.scheduler.maybe_submit_lookup_request(one, token_ids=tokens)
            wait_for(lambda: sum(engine.scheduler.check_lookup_result(one) == 0 for one in names) >= 2)
            assert set(troubles(engine.scheduler.metrics, "lookup")) == {"busy"}
        finally:
            go_on.set()
        wait_for(lambda: all(engine.scheduler.check_lookup_result(one) is not None for one in names))


# --- lookups ------------------------------------------------------------------------------------------------


def test_a_lookup_in_many_requests_finds_what_one_request_finds_and_asks_for_so_many_keys_at_most(
    server, engine, tokens, monkeypatch
):
    engine.store(tokens)
    before = server.metrics.totals()
    monkeypatch.setattr(lookups, "REQUEST_KEYS", 2)
    assert engine.lookup(tokens) == 3 * CHUNK
    assert engine.lookup([*tokens[: 2 * CHUNK], *[9] * 3 * CHUNK]) == 2 * CHUNK
    after = server.metrics.totals()
    counted = [
        after["tokens", "lookup", one] - before["tokens", "lookup", one] for one in ("requested", "hit")
    ]
    assert counted == [8 * CHUNK, 5 * CHUNK]
    monkeypatch.setattr(lookups, "MOST_KEYS", 2)
    assert engine.lookup(tokens) == 2 * CHUNK


def test_an_error_of_one_lookup_does_not_end_the_others_and_one_of_an_engine_that_goes_keeps_nothing(
    server, engine, tokens, monkeypatch
):
    engine.store(tokens)
    backend = next(model for model in server.models if model.group.model == engine.model).mover.backend
    ask = backend.batched_contains

    def broken(*arguments, **options):
        raise KeyError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "batched_contains", broken)
        assert engine.lookup(tokens) == 0
        assert troubles(server.metrics, "lookup")["internal"] == 3, "an outage is no plain miss"

    def leave(*arguments, **options):
        server._gone(engine.scheduler._cache.connection.client.encode())
        return ask(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "batched_contains", leave)
        assert engine.lookup(tokens, "gone") == 3 * CHUNK
        assert "gone" not in [name for _, name in server.sessions._sessions]
    wait_for(lambda: engine.lookup(tokens) == 3 * CHUNK, "the engine saying hello again")


def test_what_a_session_holds_outlives_its_lease_in_the_pool(make_pool, tmp_path):
    pool = make_pool(segment="16MiB", lease_ttl_ms=4000).start()
    # renewed long before it ends
    with served(pool, tmp_path, lease_s=0.3) as server, Engine(server.url) as engine:
        held, control = list(range(3 * CHUNK)), list(range(1000, 1000 + 3 * CHUNK))
        for name, tokens in (("held", held), ("control", control)):
            store_surely(engine, tokens)
            assert engine.lookup(tokens, name) == 3 * CHUNK
        engine.scheduler.end_session("control")
        model = next(iter(server.models))
        store = model.mover.backend.store

        def refused(tokens):
            keys = model.database.keys(model.database.name_chunks(tokens))
            return sum(status.name == "BUSY" for status in store.remove(keys, end_in(60)))

        wait_for(lambda: refused(control) == 0, "the lease of what no session holds to end")
        assert refused(held) == 3
        assert pinned_keys(server) == 3
        server.sessions._clock = lambda: time.monotonic() + 24 * LATE_S
        wait_for(lambda: refused(held) == 0, "the session to end at its deadline, and then the last lease")
        assert not server.sessions._sessions
