"""Engines over a cache server and a real pool: what the adapters promise."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pd_cache.chunks import LayerGroup
from pd_cache.config import CacheConfig
from pd_cache.errors import CacheServerError, RefusedError
from pd_cache.layout import PageKind, shard_tensors
from pd_cache.reasons import Found, StoreOutcome
from pd_cache.server.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from pd_cache.server.client import ServerCache
from pd_cache.server.connection import server_welcome
from pd_cache.server.protocol import EngineIdentity, FurtherLayers, Retrieve
from pd_cache.server.server import CacheServer
from pd_cache.versions import FIRST
from tests.support.engines import BLOCK, BLOCKS, CHUNK
from tests.support.engines import host as in_process
from tests.support.kv import KINDS_WITH_TOKENS, make_cache
from tests.support.pool import Pool
from tests.support.server import LATE_S, PER_CHUNK, Engine, move_unchecked, same_tensors, served, store_surely, troubles
from tests.support.waiting import wait_for

_prompts = itertools.count()


@pytest.fixture(scope="module")
def server(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    with served(pool, tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)  # the server's backend, which it opens for its first engine, is no test's
def shared_engine(server: CacheServer) -> Iterator[Engine]:
    with Engine(server.url) as engine:
        store_surely(engine, list(range(50_000, 50_000 + CHUNK)))
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """An engine that all tests of this module share, with nothing left to report."""
    shared_engine.worker.get_block_ids_with_load_errors()
    shared_engine.worker.get_failed_stores()
    return shared_engine


@pytest.fixture
def tokens() -> list[int]:
    """Three chunks and a tail that no other test uses."""
    first = 1000 * next(_prompts)
    return list(range(first, first + 3 * CHUNK + 5))


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def test_what_one_engine_stores_another_one_finds_and_loads(
    server: CacheServer, engine: Engine, tokens: Any, name: str
) -> None:
    engine.store(name, tokens)
    with Engine(server.url, engine.model) as other:
        assert other.lookup(name, tokens) == 3 * CHUNK
        assert other.retrieve(name, tokens, first_block=20) == set()
        assert other.holds(tokens[: 3 * CHUNK], first_block=20)


def test_it_shares_chunks_with_engines_that_have_their_own_cache(
    pool: Pool, server: CacheServer, tokens: Any, name: str
) -> None:
    model = uuid.uuid4().hex
    with in_process(pool, model=model) as alone, Engine(server.url, model) as engine:
        slots = list(range(len(tokens)))
        alone.compute(tokens, slots)
        alone.store(tokens, slots)
        wait_for(lambda: engine.lookup(uuid.uuid4().hex, tokens) == 3 * CHUNK, 10)
        assert engine.retrieve(name, tokens) == set()
        assert engine.holds(tokens[: 3 * CHUNK])


def test_a_lookup_is_submitted_once_and_forgotten_when_cleaned_up(engine: Engine, tokens: Any, name: str) -> None:
    scheduler = engine.scheduler
    with pytest.raises(ValueError, match="no lookup was submitted"):
        scheduler.check_lookup_result(name)
    scheduler.maybe_submit_lookup_request(name, token_ids=tokens)
    scheduler.maybe_submit_lookup_request(name, token_ids=[1.5])  # type: ignore[list-item]  # not even looked at
    wait_for(lambda: scheduler.check_lookup_result(name) == 0)
    engine.store(name, tokens)
    assert scheduler.check_lookup_result(name) == 0, "the answer to one lookup does not change"
    scheduler.cleanup_lookup_result(name)
    scheduler.cleanup_lookup_result(name)
    assert engine.lookup(name, tokens) == 3 * CHUNK


def test_exactly_one_of_hashes_and_tokens_is_taken(engine: Engine, tokens: Any, name: str) -> None:
    for wrong in ({}, {"token_ids": tokens, "block_hashes": [b"x" * 16]}):
        with pytest.raises(ValueError, match="exactly one"):
            engine.scheduler.maybe_submit_lookup_request(name, **wrong)
    with pytest.raises(ValueError, match="names chunks by tokens, not by blocks"):
        engine.scheduler.maybe_submit_lookup_request(name, block_hashes=[b"x" * 16])


def test_a_prompt_shorter_than_a_chunk_is_a_miss_at_once(engine: Engine, name: str) -> None:
    engine.scheduler.maybe_submit_lookup_request(name, token_ids=[1] * (CHUNK - 1))
    assert engine.scheduler.check_lookup_result(name) == 0


def test_both_adapters_tell_blocks_per_chunk(engine: Engine) -> None:
    assert engine.scheduler.num_blocks_per_chunk() == engine.worker.num_blocks_per_chunk() == PER_CHUNK


@pytest.mark.parametrize(("said", "chosen"), [("blocks", ""), ("auto", "blocks")])
def test_hash_mode_works_from_block_hashes_alone(pool: Pool, tmp_path: Path, said: Any, chosen: str) -> None:
    hashes = [bytes([index]) * 32 for index in range(6)]
    with (
        served(pool, tmp_path, cache=CacheConfig(chunk_size=CHUNK, hash_mode=said)) as server,
        Engine(server.url, hash_mode=chosen) as engine,
    ):
        engine.compute(list(range(24)))

        def stored() -> bool:
            engine.worker.submit_store_request("a", LoadStoreOp(list(range(6)), block_hashes=hashes))
            engine.finish_store("a")
            return not engine.worker.get_failed_stores()

        wait_for(stored, 30)
        engine.scheduler.maybe_submit_lookup_request("b", block_hashes=[*hashes, b"\xff" * 32, b"\xff" * 32])
        wait_for(lambda: engine.scheduler.check_lookup_result("b") == 24)
        engine.worker.submit_retrieve_request("b", LoadStoreOp(list(range(10, 16)), block_hashes=hashes))
        engine.finish_retrieve("b")
        assert engine.worker.get_block_ids_with_load_errors() == set()
        assert engine.holds(list(range(24)), first_block=10)


def test_an_op_may_begin_at_any_chunk_of_the_prompt(engine: Engine, tokens: Any, name: str) -> None:
    engine.store(name, tokens)
    op = LoadStoreOp(list(range(30, 34)), token_ids=tokens, start=CHUNK, end=3 * CHUNK)
    engine.worker.submit_retrieve_request(name, op)
    engine.finish_retrieve(name)
    engine.compute(tokens, first_block=40)
    for tensor in engine.cache:
        assert torch.equal(tensor[30:34].view(torch.int16), tensor[42:46].view(torch.int16))


def test_extra_keys_keep_tenants_apart(engine: Engine, tokens: Any, name: str) -> None:
    engine.store(name, tokens, extra_keys=("salt", "x"))
    assert engine.lookup(name, tokens) == 0
    assert engine.lookup(name, tokens, extra_keys=("salt", "x")) == 3 * CHUNK
    assert engine.retrieve(name, tokens, extra_keys=("salt", "y")) == set(range(3 * PER_CHUNK))


@pytest.mark.parametrize("kind", KINDS_WITH_TOKENS)
def test_tensors_of_every_layout_are_mapped_as_they_lie(
    pool: Pool, tmp_path: Path, kind: PageKind, tokens: Any, name: str
) -> None:
    with served(pool, tmp_path) as server, Engine(server.url, kind=kind) as engine:
        store_surely(engine, tokens)
        assert engine.retrieve(name, tokens, first_block=20) == set()
        assert engine.holds(tokens[: 3 * CHUNK], first_block=20)


# --- failures are told -----------------------------------------------------------------------------------------------


def test_a_hole_makes_the_blocks_behind_it_bad(server: CacheServer, engine: Engine, tokens: Any, name: str) -> None:
    engine.store(name, tokens)
    model = next(model for model in server.models if model.group.model == engine.model)
    keys = model.database.keys(model.database.hash_tokens(tokens))
    model.mover.backend.store.remove([keys[1]], timeout=60, force=True)  # type: ignore[attr-defined]
    assert engine.retrieve(name, tokens, first_block=20) == set(range(20 + PER_CHUNK, 20 + 3 * PER_CHUNK))
    assert engine.holds(tokens[:CHUNK], first_block=20)
    assert engine.worker.get_block_ids_with_load_errors() == set(), "bad blocks are told once"


def test_each_request_of_a_batch_ends_by_itself_with_its_own_bad_blocks(engine: Engine, tokens: Any) -> None:
    good, bad, half = (uuid.uuid4().hex for _ in range(3))
    engine.store(good, tokens[: 2 * CHUNK])
    ops = [
        engine.op(tokens[: 2 * CHUNK], 20),
        engine.op([7] * CHUNK, 30),
        engine.op(tokens, 40),
    ]
    engine.worker.batched_submit_retrieve_requests([good, bad, half], ops)
    done: set[str] = set()
    wait_for(lambda: done.update(engine.worker.get_finished(set())[1] or ()) or done == {good, bad, half})
    assert engine.worker.get_block_ids_with_load_errors() == {30, 31, 44, 45}
    assert engine.holds(tokens[: 2 * CHUNK], 20)
    assert engine.holds(tokens[: 2 * CHUNK], 40)


def test_a_batch_of_stores_ends_for_each_request(engine: Engine, tokens: Any) -> None:
    names = [uuid.uuid4().hex for _ in range(4)]
    prompts = [[*tokens[:CHUNK], index, *tokens[1:CHUNK]] for index in range(4)]
    for index, prompt in enumerate(prompts):
        engine.compute(prompt, 8 * index)
    ops = [engine.op(prompt, 8 * index) for index, prompt in enumerate(prompts)]
    engine.worker.batched_submit_store_requests(names, ops)
    done: set[str] = set()
    wait_for(lambda: done.update(engine.worker.get_finished(set(names))[0] or ()) or done == set(names))
    assert [engine.lookup(name, prompt) for name, prompt in zip(names, prompts, strict=True)] == [2 * CHUNK] * 4


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (LoadStoreOp([0, 1]), "exactly one"),
        (LoadStoreOp([0, 1], token_ids=[1] * 8, block_hashes=[b"x" * 16] * 2), "exactly one"),
        (LoadStoreOp([0, 1], token_ids=[1] * 8, start=4, end=8), "multiple of 8"),
        (LoadStoreOp([0, 1], token_ids=[1] * 8, start=0, end=9), "must lie in order within the 8 tokens"),
        (LoadStoreOp([0], token_ids=[1] * 8, start=0, end=8), "lie in 2 blocks, got 1"),
        (LoadStoreOp([0], token_ids=[2**40] * 8, start=0, end=8), "int32"),
    ],
)
def test_an_op_that_does_not_fit_is_a_value_error_before_anything_moves(
    engine: Engine, op: LoadStoreOp, message: str
) -> None:
    names = {uuid.uuid4().hex for _ in range(3)}
    good, *bad = sorted(names)
    for submit in (engine.worker.submit_store_request, engine.worker.submit_retrieve_request):
        with pytest.raises(ValueError, match=message):
            submit(bad[0], op)
    with pytest.raises(ValueError, match=message):
        engine.worker.batched_submit_store_requests([good, bad[1]], [engine.op([1] * CHUNK), op])
    assert engine.worker.get_finished(names) == (names, set()), "nothing is under way"


@pytest.mark.parametrize("block", [BLOCKS, 2**31, 0])
def test_block_ids_are_checked_by_the_server_too(engine: Engine, block: int, tokens: Any, name: str) -> None:
    engine.store(name, tokens)
    before = [tensor.clone() for tensor in engine.cache]
    op = LoadStoreOp([0, block], token_ids=tokens, start=0, end=CHUNK)
    with pytest.raises(ValueError, match=r"blocks must lie in|named twice"):
        engine.worker.submit_retrieve_request(name, op)
    cache = engine.worker._cache
    names = cache.name_chunks(tokens[:CHUNK])
    with pytest.raises(RefusedError) as refused:
        move_unchecked(cache.connection, Retrieve, names, op.block_ids)
    assert refused.value.reason == "invalid"
    assert same_tensors(engine.cache, before)


# --- finished requests -----------------------------------------------------------------------------------------------


def test_a_request_is_told_once_even_where_the_engine_tells_it_twice(engine: Engine, tokens: Any, name: str) -> None:
    engine.compute(tokens)
    engine.worker.submit_store_request(name, engine.op(tokens))
    told: list[str] = []

    def poll() -> bool:
        stored, _ = engine.worker.get_finished({name})
        told.extend(stored or ())
        return bool(told)

    wait_for(poll)
    assert engine.worker.get_finished({name})[0] == set()
    assert told == [name]


def test_a_request_with_several_stores_is_told_when_the_last_has_ended(engine: Engine, tokens: Any, name: str) -> None:
    engine.compute(tokens)
    for start in range(0, 3 * CHUNK, CHUNK):
        blocks = list(range(start // BLOCK, (start + CHUNK) // BLOCK))
        engine.worker.submit_store_request(name, LoadStoreOp(blocks, token_ids=tokens, start=start, end=start + CHUNK))
    assert engine.worker.get_finished(set())[0] == set(), "the engine has not finished it"
    engine.finish_store(name)
    assert engine.lookup(name, tokens) == 3 * CHUNK


def test_a_request_that_stores_again_under_its_old_name_is_told_again(engine: Engine, tokens: Any, name: str) -> None:
    engine.store(name, tokens)
    engine.store(name, [*tokens[1:], 5])
    assert engine.worker.get_finished({name})[0] == set()


def test_a_request_that_stored_nothing_is_told_at_once(engine: Engine) -> None:
    assert engine.worker.get_finished({"never seen"})[0] == {"never seen"}


# --- several groups of layers ----------------------------------------------------------------------------------------


def test_a_lookup_asks_for_all_groups_of_layers_and_pins_what_a_load_needs_of_each(pool: Pool, tmp_path: Path) -> None:
    """Each group has a connection of its own for its tensors; a scheduler has one for all."""
    model = uuid.uuid4().hex
    kept = {
        "full": LayerGroup(layers="0-1", keeps="every token", tail=0),
        "window": LayerGroup(layers="2-4", keeps="the last tokens", tail=2),
    }
    caches = {
        "full": make_cache(blocks=BLOCKS, block_size=BLOCK),
        "window": make_cache(layers=3, blocks=BLOCKS, block_size=BLOCK),
    }
    identities = {
        name: EngineIdentity(model=model, block_size=BLOCK, chunk_size=CHUNK, layers=layers)
        for name, layers in kept.items()
    }
    identities["window"] = msgspec.structs.replace(identities["window"], shards_per_rank=3)
    asking = msgspec.structs.replace(identities["full"], further=(FurtherLayers(kept["window"], BLOCK, 1, 3),))
    late = {"move_timeout_s": LATE_S, "lookup_timeout_s": LATE_S}
    with served(pool, tmp_path) as server, contextlib.ExitStack() as stack:
        workers = {name: ServerCache(server.url, one, **late) for name, one in identities.items()}
        scheduler = ServerCache(server.url, asking, kind="scheduler", **late)
        for one in (*workers.values(), scheduler):
            stack.callback(one.close)
        scheduler.connection.wait_ready(LATE_S)
        names = [bytes([number]) * 16 for number in range(5)]
        assert scheduler.lookup(names) == 0, "before all groups are registered"
        for name, worker in workers.items():
            worker.register_kv_caches(caches[name])
        wait_available(server)
        before = server.sessions.pinned
        assert workers["full"].store(names, range(5 * PER_CHUNK)) == [StoreOutcome.NEW] * 5
        assert scheduler.begin_lookup(names).survey() == Found(0, 5, "no_tail", FIRST)
        end = [-1, *range(1, 2 * PER_CHUNK)]
        assert workers["window"].store(names[2:4], end) == [StoreOutcome.NEW] * 2
        with pytest.raises(ValueError, match="blocks must lie"):
            workers["full"].store(names[:2], end)
        assert scheduler.begin_lookup(names, session="a").survey() == Found(4, 5, "no_tail", FIRST)
        assert server.sessions.pinned == before + 4 + 2 * 3
        assert scheduler.begin_lookup(names, at_hand=3).survey() == Found(4, 5, "no_tail", FIRST)
        into = range(20, 20 + 4 * PER_CHUNK)
        assert workers["full"].retrieve(names[:4], into, session="a") == 4
        assert server.sessions.pinned == before + 2 * 3
        assert workers["window"].retrieve(names[2:4], [-1, *range(31, 30 + 2 * PER_CHUNK)], session="a") == 2
        assert server.sessions.pinned == before
        for now, then in zip(caches["full"], make_views(caches["full"], range(4 * PER_CHUNK)), strict=True):
            assert torch.equal(now.view(torch.int16)[list(into)], then)


def test_a_lookup_for_an_engine_with_a_draft_model_ends_a_chunk_earlier_and_pins_what_a_load_needs(
    pool: Pool, tmp_path: Path
) -> None:
    """Nothing lies under the first name, and that is no hole."""
    drafter = LayerGroup(layers="2", keeps="every token, for drafts", tail=0, ahead=1)
    caches = [make_cache(blocks=BLOCKS, block_size=BLOCK), make_cache(layers=1, blocks=BLOCKS, block_size=BLOCK)]
    own = EngineIdentity(model=uuid.uuid4().hex, block_size=BLOCK, chunk_size=CHUNK)
    identities = [own, msgspec.structs.replace(own, layers=drafter)]
    asking = msgspec.structs.replace(own, further=(FurtherLayers(drafter, BLOCK, 1, 1),))
    late = {"move_timeout_s": LATE_S, "lookup_timeout_s": LATE_S}
    with served(pool, tmp_path) as server, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(ServerCache(server.url, one, **late))) for one in identities]
        scheduler = stack.enter_context(contextlib.closing(ServerCache(server.url, asking, kind="scheduler", **late)))
        scheduler.connection.wait_ready(LATE_S)
        for worker, cache in zip(workers, caches, strict=True):
            worker.register_kv_caches(cache)
        wait_available(server)
        names = [bytes([number]) * 16 for number in range(5)]
        assert workers[0].store(names, range(5 * PER_CHUNK)) == [StoreOutcome.NEW] * 5
        assert scheduler.begin_lookup(names).survey().chunks == 0
        assert workers[1].store(names[1:], range(4 * PER_CHUNK)) == [StoreOutcome.NEW] * 4
        before = server.sessions.pinned
        assert scheduler.begin_lookup(names, session="a").survey() == Found(4, 4, "none", FIRST)
        assert server.sessions.pinned == before + 4 + 4
        assert scheduler.begin_lookup(names, at_hand=2).survey() == Found(4, 4, "none", FIRST)
        assert scheduler.begin_lookup(names[:3]).survey() == Found(2, 2, "none", FIRST)
        assert workers[1].retrieve(names[1:], range(4 * PER_CHUNK), session="a") == 4


def test_a_lookup_finds_groups_of_layers_that_are_cut_into_different_numbers_of_shards(
    pool: Pool, tmp_path: Path
) -> None:
    """As latents, of which every rank holds all, beside states, of which each holds a part."""
    model, names = uuid.uuid4().hex, [bytes([number]) * 16 for number in range(2)]
    latents, states = (LayerGroup(layers=layers, keeps=layers, tail=0) for layers in ("latents", "states"))
    late = {"move_timeout_s": LATE_S, "lookup_timeout_s": LATE_S}
    first = EngineIdentity(model=model, block_size=BLOCK, chunk_size=CHUNK, layers=latents)
    ranks = [
        msgspec.structs.replace(first, layers=states, world_size=2, rank=rank, shards_per_rank=3) for rank in range(2)
    ]
    asking = msgspec.structs.replace(first, further=(FurtherLayers(states, BLOCK, 2, 3),))
    with served(pool, tmp_path) as server, contextlib.ExitStack() as stack:
        scheduler = ServerCache(server.url, asking, kind="scheduler", **late)
        stack.callback(scheduler.close)
        scheduler.connection.wait_ready(LATE_S)
        for one in (first, *ranks):
            assert scheduler.lookup(names) == 0
            worker = ServerCache(server.url, one, **late)
            stack.callback(worker.close)
            worker.connection.wait_ready(LATE_S)
            worker.register_kv_caches(make_cache(blocks=BLOCKS, block_size=BLOCK))
            wait_available(server)
            assert worker.store(names, range(2 * PER_CHUNK)) == [StoreOutcome.NEW] * 2
        assert scheduler.lookup(names) == 2


def wait_available(server: CacheServer) -> None:
    """Waits until the pool answers for each of the sizes that the server's engines have registered."""
    for backend in server.models.backends:
        backend.wait_available(LATE_S)


def make_views(cache: list[torch.Tensor], blocks: Sequence[int]) -> list[torch.Tensor]:
    """The bits of some blocks of each layer."""
    return [tensor.view(torch.int16)[list(blocks)] for tensor in cache]


def test_a_server_whose_file_leaves_the_size_of_chunks_open_serves_each_engine_with_its_own(
    pool: Pool, tmp_path: Path
) -> None:
    with served(pool, tmp_path, cache=CacheConfig()) as server:
        for size in (CHUNK, 3 * CHUNK):
            cache = ServerCache(server.url, EngineIdentity(model="m", block_size=BLOCK, chunk_size=size))
            try:
                cache.connection.wait_ready(LATE_S)
                assert cache.chunk_size == size
            finally:
                cache.close()
        assert server_welcome(server.url, LATE_S).may_size


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_lookup_pins_until_the_retrieve_or_the_sessions_end(server: CacheServer, engine: Engine, tokens: Any) -> None:
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    engine.store(one, tokens)
    before = server.sessions.pinned
    assert engine.lookup(one, tokens) == 3 * CHUNK
    assert server.sessions.pinned == before + 3
    engine.lookup(other, tokens)
    assert server.sessions.pinned == before + 6
    engine.retrieve(one, tokens, 20)
    assert server.sessions.pinned == before + 3
    engine.scheduler.end_session(other)
    engine.scheduler.end_session(other)
    wait_for(lambda: server.sessions.pinned == before)


def test_what_a_session_holds_outlives_its_lease_in_the_pool(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool(segment="16MiB", lease_ttl_ms=3000).start()
    with served(pool, tmp_path, lease_s=0.3) as server, Engine(server.url) as engine:  # renewed long before it ends
        held, control = list(range(3 * CHUNK)), list(range(1000, 1000 + 3 * CHUNK))
        for name, tokens in (("held", held), ("control", control)):
            store_surely(engine, tokens)
            assert engine.lookup(name, tokens) == 3 * CHUNK
        engine.scheduler.end_session("control")
        model = next(iter(server.models))
        store = model.mover.backend.store  # type: ignore[attr-defined]

        def refused(tokens: list[int]) -> int:
            keys = model.database.keys(model.database.hash_tokens(tokens))
            return sum(status.name == "BUSY" for status in store.remove(keys, timeout=60))

        for _ in range(2):
            wait_for(lambda: refused(control) == 0, what="the lease of what no session holds to end")
            assert refused(held) == 3
            store_surely(engine, control)
        engine.scheduler.end_session("held")
        wait_for(lambda: refused(held) == 0, what="the last lease to end")


def test_a_session_ends_at_its_deadline(pool: Pool, tmp_path: Path) -> None:
    with served(pool, tmp_path, session_s=600) as server, Engine(server.url) as engine:
        tokens = list(range(2 * CHUNK))
        store_surely(engine, tokens)
        engine.lookup("forgotten", tokens)
        assert server.sessions.pinned
        server.sessions._clock = lambda: time.monotonic() + 600
        wait_for(lambda: not server.sessions.pinned and not len(server.sessions))


# --- shards ----------------------------------------------------------------------------------------------------------


def test_a_prefix_counts_when_every_rank_has_stored_its_shard(server: CacheServer, tokens: Any, name: str) -> None:
    model = uuid.uuid4().hex
    with (
        Engine(server.url, model, world_size=2, rank=0) as first,
        Engine(server.url, model, world_size=2, rank=1) as second,
    ):
        first.store(name, tokens)
        assert first.lookup(name, tokens) == 0
        second.store(name, [*tokens[:CHUNK]])
        assert first.lookup(name, tokens) == CHUNK
        held = server.sessions.pinned
        first.retrieve(name, tokens[:CHUNK], 20)
        assert server.sessions.pinned == held - 1, "the other rank's shard is still to be loaded"
        second.retrieve(name, tokens[:CHUNK], 20)
        assert server.sessions.pinned == held - 2
        assert first.holds(tokens[:CHUNK], 20)
        assert second.holds(tokens[:CHUNK], 20)


def test_engines_of_different_tensor_parallel_size_share_chunks(server: CacheServer, tokens: Any, name: str) -> None:
    model = uuid.uuid4().hex
    whole = make_cache(heads=6, blocks=BLOCKS, block_size=BLOCK)  # a half is as large as the chunks of the other tests
    halves = [[view.clone() for view in views] for views in shard_tensors(whole, 2)]
    blank = [torch.zeros_like(layer) for layer in whole]
    blocks = 3 * PER_CHUNK
    with (
        Engine(server.url, model, world_size=2, rank=0, cache=halves[0]) as first,
        Engine(server.url, model, world_size=2, rank=1, cache=halves[1]) as second,
        Engine(server.url, model, shards_per_rank=2, cache=blank) as alone,
    ):
        for rank in (first, second):
            assert alone.lookup(name, tokens) == 0
            rank.worker.submit_store_request(name, rank.op(tokens))
            rank.finish_store(name)
        assert alone.lookup(name, tokens) == 3 * CHUNK
        pinned = server.sessions.pinned
        assert alone.retrieve(name, tokens, 20) == set()
        assert server.sessions.pinned == pinned - 6, "three chunks of two shards, all of which this rank has loaded"
        assert same_tensors([layer[20 : 20 + blocks] for layer in alone.cache], [layer[:blocks] for layer in whole])

        longer = [*tokens[: 2 * CHUNK], *range(7_000_000, 7_000_000 + CHUNK)]
        alone.worker.submit_store_request("back", alone.op(longer, 20))
        alone.finish_store("back")
        assert alone.worker.get_failed_stores() == {}
        for rank in (first, second):
            assert rank.lookup("back", longer) == 3 * CHUNK
            assert rank.retrieve("back", longer, 40) == set()
            assert same_tensors(
                [layer[40 : 40 + blocks] for layer in rank.cache], [layer[:blocks] for layer in rank.cache]
            )


def test_pages_that_cannot_be_cut_into_so_many_shards_are_refused_in_words(server: CacheServer) -> None:
    with pytest.raises(RefusedError, match="3 KV heads cannot be cut into 2 equal shards"):
        Engine(server.url, shards_per_rank=2)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_worker_whose_tensors_differ_from_its_groups_is_refused_in_words(server: CacheServer, engine: Engine) -> None:
    with pytest.raises(RefusedError, match="are not interchangeable"):
        Engine(server.url, engine.model, kind=PageKind.KV_OUTER)


def test_a_block_size_that_does_not_divide_the_chunk_is_refused_in_words(server: CacheServer) -> None:
    for adapter in (SchedulerAdapter, WorkerAdapter):
        with pytest.raises(
            RefusedError, match="chunks have 8 tokens, which is not a multiple of the engine's block size 3"
        ):
            adapter(server.url, None, EngineIdentity(model="m", block_size=3))


def test_tensors_of_another_block_size_than_the_engine_said_are_refused(server: CacheServer) -> None:
    worker = WorkerAdapter(server.url, None, EngineIdentity(model="m", block_size=2))
    try:
        with pytest.raises(RefusedError, match="blocks of 4 tokens, the engine said 2"):
            worker.register_kv_caches({"0": torch.zeros(8, 2, 4, 4)})
    finally:
        worker.shutdown()


def test_a_chunk_size_other_than_the_servers_leaves_an_engine_without_a_cache(
    server: CacheServer, tokens: Any, name: str
) -> None:
    with Engine(server.url, chunk_size=2 * CHUNK, register=False) as engine:
        with pytest.raises(RefusedError, match=f"{CHUNK} tokens, this engine was made for {2 * CHUNK}"):
            engine.worker._cache.connection.wait_ready(60)
        with pytest.raises(RefusedError, match="this engine was made for"):
            engine.worker.register_kv_caches(engine.tensors)
        assert not engine.worker.available
        assert engine.lookup(name, tokens) == 0


def test_a_registration_does_not_wait_for_a_server_that_refused_the_engine_and_went_away(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cache.server.connection._REGISTER_S", 3600.0)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(pool, tmp_path))
        engine = stack.enter_context(Engine(server.url, chunk_size=2 * CHUNK, register=False))
        connection = engine.worker._cache.connection
        with pytest.raises(RefusedError):
            connection.wait_ready(60)
        server.close()
        wait_for(lambda: not connection._connected)
        engine.worker.register_kv_caches(engine.tensors)
        assert not engine.worker.available


def test_a_registration_is_not_refused_for_the_tensors_before_it(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(server.url, register=False) as engine:
        connection = engine.worker._cache.connection
        usual, asked, go = connection._register, threading.Event(), threading.Event()

        def slow(*arguments: Any) -> None:
            asked.set()
            assert go.wait(60)
            usual(*arguments)

        connection.wait_ready(60)
        monkeypatch.setattr(connection, "_register", slow)
        with ThreadPoolExecutor(2) as threads:
            wrong = threads.submit(connection.register, [torch.zeros(8, 2, BLOCK + 1, 4)])
            assert asked.wait(60)
            right = threads.submit(connection.register, engine.cache)
            wait_for(lambda: connection._lent is not None and connection._lent[0] is engine.cache)
            go.set()
            right.result(60)
            assert wrong.exception(60) is None, "what replaced its tensors is registered"
        assert connection.ready


def test_without_a_server_a_constructor_that_needs_it_says_so_and_one_that_does_not_goes_on(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/nobody.sock"
    with pytest.raises(CacheServerError, match=r"no cache server answered at ipc://.* within 0.2 s"):
        SchedulerAdapter(url, None, EngineIdentity(model="m", block_size=4), connect_timeout_s=0.2)
    with Engine(url, chunk_size=CHUNK) as engine:
        tokens = list(range(CHUNK))
        assert engine.lookup("a", tokens) == 0
        engine.store("a", tokens)
        assert engine.worker.get_failed_stores() == {"a": "server_lost"}
        assert engine.retrieve("a", tokens) == {0, 1}
        assert set(troubles(engine.scheduler.metrics, "lookup")) == {"server_lost"}, "an outage is no plain miss"


def test_two_servers_at_one_address_are_one_too_many(pool: Pool, server: CacheServer) -> None:
    with pytest.raises(CacheServerError, match="another cache server already listens"):
        CacheServer(server.settings, server.node, server.url)


def test_a_full_queue_is_busy_and_busy_is_a_miss(pool: Pool, tmp_path: Path) -> None:
    with served(pool, tmp_path, max_in_flight=2, threads=2) as server, Engine(server.url) as engine:
        tokens = list(range(CHUNK))
        store_surely(engine, tokens)
        go_on = threading.Event()
        model = next(iter(server.models))
        backend = model.mover.backend
        ask = backend.batched_contains
        backend.batched_contains = lambda *a, **k: (go_on.wait(60), ask(*a, **k))[1]  # type: ignore[method-assign]
        try:
            names = [uuid.uuid4().hex for _ in range(4)]
            for one in names:
                engine.scheduler.maybe_submit_lookup_request(one, token_ids=tokens)
            wait_for(lambda: sum(engine.scheduler.check_lookup_result(one) == 0 for one in names) >= 2)
            assert set(troubles(engine.scheduler.metrics, "lookup")) == {"busy"}
        finally:
            go_on.set()
        wait_for(lambda: all(engine.scheduler.check_lookup_result(one) is not None for one in names))


# --- the engine-like face --------------------------------------------------------------------------------------------
