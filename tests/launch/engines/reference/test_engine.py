"""The engine in-process: the same tokens whatever the cache does, and every block back afterwards."""

import random
import threading
import time

import pytest

from launch.engines.reference.requests import GenerationError, GenerationRequest
from tests.support.waiting import wait_for

from .conftest import prompt_of, request_of, tokens_of
from .fake_cache import ClaimingCache, FakeCache, Gate

FOR_EVER = 600_000
"""Milliseconds."""


def answered(engine, request):
    """Tokens and statistics of a request."""
    generation = engine.submit(request)
    return tokens_of(generation), generation.stats


def holding(make_engine, request):
    """A cache with the whole chunks of a prompt, as another engine has stored them."""
    cache = FakeCache()
    answered(make_engine(cache), request)
    cache.wait_for_chunks(len(request.prompt) // 16)
    return cache


def metric(engine, name, **labels):
    return engine.metrics.registry.get_sample_value(f"pd_cache_reference_{name}", labels) or 0.0


def cancelled(stream):
    stream.cancel()
    ends_as("aborted", stream)


def ends_as(kind, generation):
    """The request ends early, for this reason."""
    with pytest.raises(GenerationError) as caught:
        tokens_of(generation)
    assert caught.value.kind == kind


def stream_of(length, seed=1):
    """The request that loads a prompt as its chunks appear."""
    return request_of(length, seed, max_tokens=1, streams=True)


def all_back(engine, blocks=64):
    """Waits until nobody holds any of its blocks."""
    wait_for(lambda: (engine.pool.free, engine.lent_blocks) == (blocks, 0))


def streaming(engine, loaded, length=64):
    """A stream of a prompt, of which so many tokens are loaded."""
    stream = engine.submit(stream_of(length))

    def there():
        return [getattr(one.load or one.result, "loaded", one.result.tokens) for one in engine._streams]

    wait_for(lambda: there() == [loaded])
    return stream


# --- the prefix ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, 96, 95, 17, 16, 15, 1])
def test_a_loaded_prefix_gives_the_tokens_of_a_computed_one(make_engine, expected, length):
    cache, request, whole = FakeCache(), request_of(length), length // 16 * 16
    for cached in (0, min(whole, length - 1)):
        tokens, stats = answered(make_engine(cache), request)
        assert tokens == expected(request)
        assert (stats.report.loaded, stats.report.computed, stats.report.asked) == (
            cached,
            length - cached,
            length,
        )
        assert stats.prefix_tokens == whole
        if whole:
            cache.wait_for_chunks(whole // 16)


def test_only_the_computed_chunks_are_stored_and_computed_in_aligned_steps(make_engine):
    cache = holding(make_engine, request_of(40))
    engine = make_engine(cache, slow=True, step_tokens=24)
    engine.model.gate.set()
    longer = GenerationRequest(prompt=prompt_of(40) + prompt_of(40, seed=2), max_tokens=2)
    _, stats = answered(engine, longer)
    cache.wait_for_chunks(5)
    assert engine.model.steps == [[(32, 16)], [(48, 24)], [(72, 8)], [(80, 1)]]
    assert (stats.report.loaded, stats.prefix_tokens) == (32, 80)
    assert sum(cache.store_sizes) == 5, "what was loaded is not stored again"
    assert cache.named == 2, "each prompt is named once, for its load and its store"
    answered(engine, longer)
    assert sum(cache.store_sizes) == 5


def test_salts_keep_requests_apart(make_engine):
    cache = FakeCache()
    engine = make_engine(cache)
    for count, salt in enumerate((None, "a", "b"), 1):
        assert answered(engine, request_of(40, cache_salt=salt))[1].report.loaded == 0
        cache.wait_for_chunks(2 * count)
    assert answered(engine, request_of(40, cache_salt="a"))[1].report.loaded == 32


# --- a cache that fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["find", "load"])
def test_a_load_that_hangs_is_left_behind_and_cannot_harm_the_blocks_of_others(make_engine, expected, at):
    cache = ClaimingCache()
    cache.before = gate = Gate(at)
    engine = make_engine(cache, load_timeout_s=0.05, max_running=2)
    try:
        held = -(-46 // 8)
        for count in (1, 2):
            assert answered(engine, request_of(40))[0] == expected(request_of(40))
            assert metric(engine, "loads_total", outcome="timeout") == count
        wait_for(lambda: engine.pool.free == 64 - 2 * held)
        # Both loading threads are stuck now: later requests do not even try.
        assert answered(engine, request_of(40))[0] == expected(request_of(40))
        assert metric(engine, "loads_total", outcome="busy") == 1
        generation = engine.submit(request_of(50, max_tokens=40))
        wait_for(lambda: metric(engine, "loads_total", outcome="busy") == 2)
    finally:
        gate.opened.set()
    assert tokens_of(generation) == expected(request_of(50, max_tokens=40))
    all_back(engine)


def test_stores_that_hang_hold_up_no_answer_and_keep_at_most_half_of_all_blocks(make_engine, expected):
    cache = FakeCache()
    cache.before = gate = Gate("store")
    engine = make_engine(cache, max_running=8)
    try:
        for seed in range(8):
            tokens, stats = answered(engine, request_of(50, seed=seed))
            assert tokens == expected(request_of(50, seed=seed))
            assert stats.prefix_tokens == (48 if seed < 5 else 0), "only what is being stored is announced"
        assert 64 - engine.pool.free == 30
        assert metric(engine, "stores_total", outcome="dropped") == 3
    finally:
        gate.opened.set()
    cache.wait_for_chunks(15)
    all_back(engine)


# --- the handoff --------------------------------------------------------------------------------------------


def test_a_decode_node_waits_no_longer_than_configured_and_takes_what_is_there(make_engine, expected):
    cache = holding(make_engine, request_of(40))
    longer = GenerationRequest(
        prompt=prompt_of(40) + prompt_of(40, seed=2), announced_prefix=80, max_tokens=4
    )
    tokens, stats = answered(make_engine(cache, wait_ms=80), longer)
    assert tokens == expected(longer)
    assert stats.report.loaded == 32
    assert stats.ttft_ms >= 80
    assert answered(make_engine(cache, wait_ms=1), request_of(40, seed=3, announced_prefix=32))[1].report.reason == "deadline"  # fmt: skip


def test_nobody_waits_for_an_announced_prefix_while_the_pool_is_down(make_engine, expected):
    cache = FakeCache()
    engine = make_engine(cache, wait_ms=FOR_EVER)
    waiting = engine.submit(request_of(40, announced_prefix=32))
    wait_for(lambda: metric(engine, "running") == 1)
    cache.available = False
    assert tokens_of(waiting) == expected(request_of(40))


def test_a_request_takes_over_what_a_stream_of_its_prompt_has_loaded(make_engine, expected):
    cache = FakeCache()
    decode = make_engine(cache, wait_ms=FOR_EVER)
    stream = decode.submit(stream_of(64))
    half = GenerationRequest(prompt=prompt_of(64)[:40], max_tokens=1)
    answered(make_engine(cache), half)
    cache.wait_for_chunks(2)
    wait_for(lambda: decode._streams[0].load.loaded == 32)
    waiting = decode.submit(request_of(64, announced_prefix=64))
    wait_for(lambda: not decode._streams[0].blocks)
    answered(make_engine(cache), request_of(64, max_tokens=1))
    assert tokens_of(waiting) == expected(request_of(64))
    report = waiting.stats.report
    assert (report.streamed, report.loaded, report.reason) == (32, 63, "none")
    cancelled(stream)


def test_a_request_that_nobody_announced_takes_over_what_was_prefetched_and_waits_for_no_more(
    make_engine, expected
):
    cache = holding(make_engine, GenerationRequest(prompt=prompt_of(64)[:40], max_tokens=1))
    decode = make_engine(cache, wait_ms=FOR_EVER)
    stream = streaming(decode, 32)
    tokens, stats = answered(decode, request_of(64))
    assert tokens == expected(request_of(64))
    assert (stats.report.loaded, stats.report.streamed) == (32, 32)
    cancelled(stream)


def test_streams_together_hold_a_quarter_of_the_blocks_and_the_others_end(make_engine):
    engine = make_engine(FakeCache(), max_running=8)
    streams = [engine.submit(stream_of(40, seed=seed)) for seed in range(4)]
    for stream in streams[2:]:
        ends_as("aborted", stream)
    assert 64 - engine.pool.free == 12, "two of six blocks each"
    assert len(tokens_of(engine.submit(request_of(40, seed=9)))) == 6
    for stream in streams[:2]:
        cancelled(stream)


def test_a_stream_gives_way_if_a_request_lacks_blocks_and_nothing_else_goes_on(make_engine, expected):
    """The request that would end the stream waits behind the one that lacks blocks."""
    engine = make_engine(FakeCache(), num_blocks=32)
    stream = engine.submit(stream_of(60))
    wait_for(lambda: engine.pool.free == 24)
    large = request_of(200, seed=5, max_tokens=40)
    before, own = engine.submit(large), engine.submit(request_of(60))
    assert tokens_of(own) == expected(request_of(60))
    assert tokens_of(before) == expected(large)
    cancelled(stream)


def test_a_request_loads_what_the_pool_has_if_the_load_of_its_stream_broke_off(make_engine, expected):
    cache, moved = holding(make_engine, request_of(64)), {}

    def lose(call):
        while call == "load" and len(cache.chunks) > 1:
            moved.update([cache.chunks.popitem()])

    cache.before = lose
    engine = make_engine(cache, wait_ms=1)
    stream = engine.submit(stream_of(64))
    wait_for(lambda: engine._streams and engine._streams[0].result.tokens == 16)
    cache.before = lambda call: None
    cache.chunks.update(moved)
    tokens, stats = answered(engine, request_of(64, announced_prefix=64))
    assert (tokens, stats.report.loaded) == (expected(request_of(64)), 63)
    cancelled(stream)


def test_what_a_stream_has_loaded_before_a_reset_is_not_used(make_engine, expected):
    cache = holding(make_engine, request_of(64))
    engine = make_engine(cache, wait_ms=1)
    stream = streaming(engine, 64)
    wait_for(lambda: engine._streams[0].result.tokens == 64)
    cache.label, _ = "other weights", cache.chunks.clear()
    tokens, stats = answered(engine, request_of(64, announced_prefix=64))
    assert tokens == expected(request_of(64))
    assert (stats.report.loaded, stats.report.streamed) == (0, 0)
    cancelled(stream)


# --- queue, cancelling, closing -----------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_only(make_engine, expected, caplog):
    engine = make_engine(slow=True)
    engine.model.poison.add(299)
    good = request_of(20, max_tokens=20)
    generations = [engine.submit(request) for request in (good, GenerationRequest(prompt=(1, 299, 3)))]
    engine.model.gate.set()
    assert tokens_of(generations[0]) == expected(good)
    ends_as("failed", generations[1])
    assert "a poisoned token" in caplog.text
    assert engine.healthy


def test_a_bug_in_the_scheduler_ends_every_request_and_is_seen(make_engine, caplog):
    cache = FakeCache()
    cache.metrics = None  # what counts a prompt when it is computed
    engine = make_engine(cache, slow=True, max_running=1)
    generations = [engine.submit(request_of(20, seed=seed)) for seed in range(3)]
    engine.model.gate.set()
    for generation in generations:
        ends_as("failed", generation)
    wait_for(lambda: not engine.healthy)
    assert "AttributeError" in caplog.text
    with pytest.raises(GenerationError, match="failed"):
        engine.submit(request_of(20))


# --- everything at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_under_an_erratic_cache_and_cancels_every_answer_is_right_and_no_block_is_lost(
    make_engine, expected, seed
):
    chance, lock, cache = random.Random(seed), threading.Lock(), FakeCache()

    def hiccup(call):
        """Answers, raises, hesitates, forgets and reports outages as the seed has it."""
        with lock:
            way, pause = chance.random(), chance.random()
            if way < 0.1 and cache.chunks:
                del cache.chunks[chance.choice(list(cache.chunks))]
            cache.available = way < 0.9
        if way < 0.4:
            time.sleep(0.08 * pause)
        if 0.4 < way < 0.55:
            raise ConnectionError("the pool is gone")

    cache.before = hiccup
    engine = make_engine(cache, wait_ms=30, load_timeout_s=0.04, max_running=4, num_blocks=48)
    heads = [prompt_of(64, seed=head) for head in range(2)]
    requests = [
        GenerationRequest(
            prompt=chance.choice(heads)[: chance.randint(1, 64)]
            + prompt_of(chance.randint(1, 40), seed=index),
            max_tokens=chance.randint(1, 12),
            announced_prefix=chance.choice([0, 0, 64]),
        )
        for index in range(40)
    ]
    streams = [
        engine.submit(GenerationRequest(prompt=request.prompt, max_tokens=1, streams=True))
        for request in requests
        if request.announced_prefix
    ]
    generations = [engine.submit(request) for request in requests]
    gone = set(chance.sample(range(40), 10))
    for index in gone:
        generations[index].cancel()
        time.sleep(0.01)
    for index, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        try:
            tokens = tokens_of(generation)
        except GenerationError:
            assert index in gone
        else:
            assert tokens == expected(request)
            assert generation.stats.report.loaded + generation.stats.report.computed == len(request.prompt)
        if index % 2 and streams:
            streams.pop(chance.randrange(len(streams))).cancel()
    for stream in streams:
        stream.cancel()
    all_back(engine, 48)
    assert engine.healthy
