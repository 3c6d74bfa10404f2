"""The engine in-process: the same tokens whatever the cache does, and every block back afterwards."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch

from launch.engines.reference import (
    EngineClosedError,
    GenerationError,
    GenerationRequest,
    QueueFullError,
    ReferenceEngine,
    SamplingParams,
)
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import HandoffConfig
from pd_cache.layout import KVLayout
from tests.support.waiting import wait_for

from .conftest import SlowModel, prompt_of, request_of, tiny_config, tokens_of
from .fake_cache import FakeCache, HangingCache, RaisingCache, ScribblingCache, scribble


def answered(engine, request):
    """Tokens and statistics of a request."""
    generation = engine.submit(request)
    return tokens_of(generation), generation.stats


def metric(engine, name: str, **labels) -> float:
    return engine.metrics.registry.get_sample_value(f"pd_cache_reference_{name}", labels) or 0.0


# --- the prefix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [100, 96, 95, 17, 16, 15, 1])
def test_a_loaded_prefix_gives_the_tokens_of_a_computed_one(make_engine, expected, length, sampling):
    request = request_of(length, sampling=SamplingParams(**sampling))
    cache = FakeCache()
    truth = expected(request)
    first, first_stats = answered(make_engine(cache), request)
    assert first == truth
    assert (first_stats.cached_tokens, first_stats.computed_tokens) == (0, length)
    whole = length // 16 * 16
    assert first_stats.prefix_tokens == whole
    if whole:
        cache.wait_for_stores(1)
    again, again_stats = answered(make_engine(cache), request)
    assert again == truth
    cached = min(whole, length - 1)
    assert (again_stats.cached_tokens, again_stats.computed_tokens) == (cached, length - cached)
    assert again_stats.prefix_tokens == whole
    assert again_stats.prompt_tokens == length


@pytest.mark.parametrize(("chunk", "step"), [(16, 64), (64, 16), (24, 16), (40, 256)])
def test_chunks_and_steps_of_any_size_go_together(make_engine, expected, chunk, step):
    cache = FakeCache(chunk)
    request = request_of(130)
    for _ in range(2):
        tokens, stats = answered(make_engine(cache, step_tokens=step), request)
        assert tokens == expected(request)
        cache.wait_for_stores(1)
    assert stats.cached_tokens == 130 // chunk * chunk


def test_only_the_computed_chunks_are_stored(make_engine):
    cache = FakeCache()
    engine = make_engine(cache)
    answered(engine, request_of(40))
    cache.wait_for_stores(1)
    longer = prompt_of(40) + prompt_of(40, seed=2)
    _, stats = answered(engine, GenerationRequest(prompt=longer, max_tokens=2))
    cache.wait_for_stores(2)
    assert (stats.cached_tokens, stats.prefix_tokens) == (32, 80)
    assert cache.store_sizes[1] == 3, "what was loaded is not stored again"
    assert cache.named == 2, "each prompt is named once, for its load and its store"
    answered(engine, request_of(40))
    assert len(cache.store_sizes) == 2


def test_a_wrong_prefix_would_be_seen():
    """The test model's tokens depend on its prefix, so that the other tests prove something."""
    engine = ReferenceEngine.open(tiny_config())
    try:
        tail = prompt_of(20, seed=9)
        heads = (prompt_of(64, seed=1), prompt_of(64, seed=2))
        requests = [GenerationRequest(prompt=head + tail, max_tokens=6) for head in heads]
        outputs = [tokens_of(engine.submit(request)) for request in requests]
        assert outputs[0] != outputs[1]
    finally:
        engine.close()


def test_salts_keep_requests_apart(make_engine):
    cache = FakeCache()
    engine = make_engine(cache)
    for count, salt in enumerate((None, "a", "b"), 1):
        assert answered(engine, request_of(40, cache_salt=salt))[1].cached_tokens == 0
        cache.wait_for_stores(count)
    assert answered(engine, request_of(40, cache_salt="a"))[1].cached_tokens == 32
    roots = {cache.name_chunks(prompt_of(40), None, keys)[0] for keys in ((), ("salt", "a"), ("salt", "b"))}
    assert len(roots) == 3
    assert roots <= set(cache.chunks)


def test_the_cache_is_made_for_the_loaded_weights_and_pages():
    seen = []

    def factory(metadata: CacheMetadata, layout: KVLayout, kv_caches: dict[str, torch.Tensor]) -> None:
        seen.append((metadata, layout, kv_caches))

    engine = ReferenceEngine.open(tiny_config(), cache=factory)
    engine.close()
    ((metadata, layout, kv_caches),) = seen
    assert kv_caches is engine.model.kv.kv_caches
    assert metadata.model == engine.model.identity
    assert (metadata.layers, metadata.block_size, layout.blocks) == (2, 8, 64)


def test_concurrent_requests_give_what_each_gives_alone(make_engine, expected):
    requests = [request_of(10 + 13 * seed, seed=seed, max_tokens=5 + seed) for seed in range(10)]
    engine = make_engine(FakeCache(), num_blocks=128, max_running=4)
    generations = [engine.submit(request) for request in requests]
    assert [tokens_of(generation) for generation in generations] == [expected(request) for request in requests]


# --- a cache that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [["lookup"], ["retrieve"], ["store"], ["lookup", "retrieve", "store"]], ids=str)
def test_a_cache_that_raises_costs_time_only(make_engine, expected, at):
    cache = RaisingCache([])
    engine = make_engine(cache)
    answered(engine, request_of(40))
    cache.wait_for_stores(1)
    cache.at = set(at)
    for length in (40, 70):
        tokens, stats = answered(engine, request_of(length))
        assert tokens == expected(request_of(length))
        assert stats.cached_tokens + stats.computed_tokens == length
    assert metric(engine, "loads_total", outcome="failed") == (0 if at == ["store"] else 2)
    wait_for(lambda: metric(engine, "stores_total", outcome="failed") > 0 or "store" not in at)


@pytest.mark.parametrize(
    "answer",
    [
        lambda count: 0,
        lambda count: count + 1,
        lambda count: -1,
        lambda count: 0.5,
        lambda count: torch.ones(count, dtype=torch.bool),
        lambda count: None,
    ],
    ids=["nothing", "too many", "negative", "half a chunk", "a tensor", "None"],
)
def test_what_a_failed_load_left_in_the_pages_is_never_attended_to(make_engine, expected, answer):
    engine = make_engine(ScribblingCache(answer))
    tokens, stats = answered(engine, request_of(60))
    assert tokens == expected(request_of(60))
    assert (stats.cached_tokens, stats.computed_tokens) == (0, 60)


def test_a_part_of_what_was_looked_up_is_used_and_the_rest_recomputed(make_engine, expected):
    cache = FakeCache()
    engine = make_engine(cache)
    answered(engine, request_of(80))
    cache.wait_for_stores(1)
    names = cache.name_chunks(prompt_of(80))
    del cache.chunks[names[2]]
    cache.lookup = lambda names, session="": len(names)
    tokens, stats = answered(engine, request_of(80))
    assert tokens == expected(request_of(80))
    assert stats.cached_tokens == 32


def test_an_outage_is_counted_as_one_and_nothing_is_announced(make_engine, expected):
    cache = FakeCache()
    cache.available = False
    engine = make_engine(cache)
    tokens, stats = answered(engine, request_of(40))
    assert tokens == expected(request_of(40))
    assert stats.prefix_tokens == 0
    assert metric(engine, "loads_total", outcome="unavailable") == 1
    assert metric(engine, "loads_total", outcome="nothing") == 0


@pytest.mark.parametrize("at", ["lookup", "retrieve"])
def test_a_load_that_hangs_is_left_behind_and_cannot_harm_the_blocks_of_others(make_engine, expected, at):
    cache = HangingCache([at])
    engine = make_engine(cache, load_timeout_s=0.05, max_running=2)
    try:
        held = -(-46 // 8)
        for count in (1, 2):
            assert answered(engine, request_of(40))[0] == expected(request_of(40))
            assert metric(engine, "loads_total", outcome="timeout") == count
        wait_for(lambda: engine.free_blocks == 64 - 2 * held)
        # Both loading threads are stuck now: later requests do not even try.
        assert answered(engine, request_of(40))[0] == expected(request_of(40))
        assert metric(engine, "loads_total", outcome="busy") == 1
        generation = engine.submit(request_of(50, max_tokens=40))
        wait_for(lambda: metric(engine, "loads_total", outcome="busy") == 2)
    finally:
        cache.let_go.set()
    assert tokens_of(generation) == expected(request_of(50, max_tokens=40))
    wait_for(lambda: engine.free_blocks == 64)
    assert engine._scheduler._lent_blocks == 0


def test_stores_that_hang_keep_their_blocks_but_at_most_half_of_all(make_engine, expected):
    cache = HangingCache(["store"])
    cache.lookup = lambda names, session="": 0
    engine = make_engine(cache, max_running=8)
    try:
        for seed in range(8):
            request = request_of(50, seed=seed)
            assert answered(engine, request)[0] == expected(request)
        assert 64 - engine.free_blocks == 28
        assert metric(engine, "stores_total", outcome="dropped") == 4
    finally:
        cache.let_go.set()
    cache.wait_for_stores(4)
    wait_for(lambda: engine.free_blocks == 64)


def test_an_answer_does_not_wait_for_its_store(make_engine):
    cache = HangingCache(["store"])
    cache.lookup = lambda names, session="": 0
    engine = make_engine(cache)
    try:
        _, stats = answered(engine, request_of(40, max_tokens=1))
        assert stats.prefix_tokens == 32
        assert cache.entered.wait(60)
        assert engine.free_blocks == 64 - 6
    finally:
        cache.let_go.set()
    wait_for(lambda: engine.free_blocks == 64)


# --- the handoff -----------------------------------------------------------------------------------------------------


def test_a_decode_node_waits_for_the_announced_prefix(make_engine, expected):
    cache = FakeCache()
    prefill, decode = make_engine(cache), make_engine(cache, handoff=HandoffConfig(wait_ms=600_000))
    waiting = decode.submit(request_of(40, announced_prefix=32))
    wait_for(lambda: decode.metrics.registry.get_sample_value("pd_cache_reference_running") == 1)
    answered(prefill, request_of(40, max_tokens=1))
    assert tokens_of(waiting) == expected(request_of(40))
    assert waiting.stats.cached_tokens == 32


def test_a_decode_node_waits_no_longer_than_configured(make_engine, expected):
    engine = make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=80))
    begun = time.monotonic()
    tokens, stats = answered(engine, request_of(40, announced_prefix=32))
    assert time.monotonic() - begun >= 0.08
    assert tokens == expected(request_of(40))
    assert stats.cached_tokens == 0
    assert stats.ttft_ms >= 80


def test_a_decode_node_takes_what_is_there_when_the_wait_is_over(make_engine, expected):
    cache = FakeCache()
    answered(make_engine(cache), request_of(40))
    cache.wait_for_stores(1)
    longer = GenerationRequest(prompt=prompt_of(40) + prompt_of(40, seed=2), announced_prefix=80, max_tokens=4)
    tokens, stats = answered(make_engine(cache, handoff=HandoffConfig(wait_ms=50)), longer)
    assert tokens == expected(longer)
    assert stats.cached_tokens == 32


def test_nobody_waits_for_an_announced_prefix_while_the_pool_is_down(make_engine, expected):
    cache = FakeCache()
    engine = make_engine(cache, handoff=HandoffConfig(wait_ms=600_000))
    waiting = engine.submit(request_of(40, announced_prefix=32))
    wait_for(lambda: metric(engine, "running") == 1)
    cache.available = False
    assert tokens_of(waiting) == expected(request_of(40))


def test_an_announcement_beyond_the_prompt_is_cut_to_its_whole_chunks(make_engine):
    cache = FakeCache()
    engine = make_engine(cache, handoff=HandoffConfig(wait_ms=600_000))
    answered(engine, request_of(40))
    cache.wait_for_stores(1)
    assert answered(engine, request_of(40, announced_prefix=10**6))[1].cached_tokens == 32


def test_cancelling_ends_a_wait_for_a_prefix(make_engine):
    engine = make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=600_000))
    waiting = engine.submit(request_of(40, announced_prefix=32))
    wait_for(lambda: metric(engine, "running") == 1)
    waiting.cancel()
    with pytest.raises(GenerationError, match="cancelled"):
        tokens_of(waiting)
    wait_for(lambda: engine.free_blocks == 64)


# --- queue, cancelling, deadlines, closing ---------------------------------------------------------------------------


def slow_engine(make_engine, **changes):
    models: list[SlowModel] = []

    def wrap(model):
        models.append(SlowModel(model, changes.pop("poison", frozenset())))
        return models[0]

    engine = make_engine(wrap=wrap, **{key: value for key, value in changes.items() if key != "poison"})
    return engine, models[0]


def test_one_request_more_than_may_run_and_wait_is_refused(make_engine):
    engine, model = slow_engine(make_engine, max_running=2, max_queue=3)
    accepted = [engine.submit(request_of(10, seed=seed)) for seed in range(5)]
    with pytest.raises(QueueFullError, match="3 requests"):
        engine.submit(request_of(10))
    model.gate.set()
    assert [len(tokens_of(generation)) for generation in accepted] == [6] * 5
    assert len(tokens_of(engine.submit(request_of(10)))) == 6
    assert metric(engine, "requests_total", outcome="rejected") == 1


def test_a_request_waits_for_blocks_and_runs_when_they_are_free(make_engine, expected):
    engine = make_engine(num_blocks=32)
    requests = [request_of(150, seed=seed, max_tokens=10) for seed in range(4)]
    generations = [engine.submit(request) for request in requests]
    assert [tokens_of(generation) for generation in generations] == [expected(request) for request in requests]


def test_cancelling_frees_blocks_in_every_phase(make_engine):
    engine, model = slow_engine(make_engine, max_running=2)
    generations = [engine.submit(request_of(40, seed=seed, max_tokens=100)) for seed in range(4)]
    for generation in generations[1:]:
        generation.cancel()
    model.gate.set()
    events = iter(generations[0])
    assert next(events).finish_reason is None
    generations[0].cancel()
    generations[0].cancel()
    with pytest.raises(GenerationError, match="cancelled"):
        list(events)
    for generation in generations[1:]:
        with pytest.raises(GenerationError) as caught:
            tokens_of(generation)
        assert caught.value.kind == "aborted"
    wait_for(lambda: engine.free_blocks == 64)
    assert engine.outstanding == 0
    assert metric(engine, "requests_total", outcome="aborted") == 4


def test_cancelling_after_the_end_does_nothing(make_engine):
    engine = make_engine()
    generation = engine.submit(request_of(10))
    tokens_of(generation)
    generation.cancel()
    assert len(tokens_of(engine.submit(request_of(10)))) == 6


def test_a_request_that_takes_too_long_is_ended(make_engine):
    engine = make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=600_000), request_timeout_s=600.0)
    generation = engine.submit(request_of(40, announced_prefix=32))
    wait_for(lambda: metric(engine, "running") == 1)
    generation.deadline = time.monotonic()
    engine.submit(request_of(1)).cancel()  # wakes the engine, which sleeps until the next deadline that it knows of
    with pytest.raises(GenerationError, match="loading") as caught:
        tokens_of(generation)
    assert caught.value.kind == "timeout"
    wait_for(lambda: engine.free_blocks == 64)


def test_a_step_that_fails_ends_its_request_only(make_engine, expected, caplog):
    engine, model = slow_engine(make_engine, poison=frozenset({299}))
    good, bad = request_of(20, max_tokens=20), GenerationRequest(prompt=(1, 299, 3))
    generations = [engine.submit(request) for request in (good, bad)]
    model.gate.set()
    assert tokens_of(generations[0]) == expected(good)
    with pytest.raises(GenerationError) as caught:
        tokens_of(generations[1])
    assert caught.value.kind == "failed"
    assert "a poisoned token" in caplog.text
    assert engine.healthy


def test_a_decode_step_that_fails_spares_the_others_in_its_batch(make_engine, expected, caplog):
    requests = [request_of(12, seed=seed, max_tokens=12) for seed in range(3)]
    truths = [expected(request) for request in requests]
    inputs = [set(request.prompt) | set(truth[:-1]) for request, truth in zip(requests, truths, strict=True)]
    poison = next(
        token
        for token in truths[0][:-1]
        if token not in requests[0].prompt and token not in inputs[1] and token not in inputs[2]
    )
    engine, model = slow_engine(make_engine, poison=frozenset({poison}))
    generations = [engine.submit(request) for request in requests]
    model.gate.set()
    with pytest.raises(GenerationError, match="computing a token failed"):
        tokens_of(generations[0])
    assert [tokens_of(generation) for generation in generations[1:]] == truths[1:]
    assert any(len(step) > 1 for step in model.steps)


def test_prompts_are_computed_in_aligned_steps_and_tokens_in_batches(make_engine):
    cache = FakeCache()
    answered(make_engine(cache), request_of(40))
    cache.wait_for_stores(1)
    engine, model = slow_engine(make_engine, cache=cache, step_tokens=24)
    model.gate.set()
    answered(engine, GenerationRequest(prompt=prompt_of(40) + prompt_of(20, seed=2), max_tokens=2))
    assert model.steps == [[(32, 16)], [(48, 12)], [(60, 1)]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 300)}, "300"),
        ({"prompt": (-1, 3)}, "-1"),
        ({"prompt": (1,), "max_tokens": 0}, "at least 1"),
        ({"prompt": (1,) * 250, "max_tokens": 7}, "max_model_len 256"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(make_engine, fields, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(GenerationRequest(**fields))
    assert engine.outstanding == 0


def test_the_longest_request_fits(make_engine):
    engine = make_engine(num_blocks=32)
    assert len(tokens_of(engine.submit(request_of(255, max_tokens=1)))) == 1
    assert len(tokens_of(engine.submit(request_of(1, max_tokens=255)))) == 255


def test_a_pool_too_small_for_one_request_is_refused():
    with pytest.raises(ValueError, match="31 blocks"):
        ReferenceEngine.open(tiny_config(num_blocks=31))


def test_closing_lets_requests_finish_within_the_grace(make_engine):
    engine, model = slow_engine(make_engine)
    generation = engine.submit(request_of(20))
    closing = threading.Thread(target=engine.close, args=(60.0,))
    closing.start()
    wait_for(lambda: not engine.healthy)
    with pytest.raises(EngineClosedError):
        engine.submit(request_of(20))
    model.gate.set()
    assert len(tokens_of(generation)) == 6
    closing.join(60)
    assert not closing.is_alive()


def test_closing_ends_requests_beyond_the_grace(make_engine):
    engine = make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=600_000))
    generation = engine.submit(request_of(40, announced_prefix=32))
    engine.close(0.05)
    with pytest.raises(GenerationError) as caught:
        tokens_of(generation)
    assert caught.value.kind == "closed"
    with pytest.raises(EngineClosedError):
        engine.submit(request_of(20))
    engine.close()


def test_a_bug_in_the_scheduler_ends_every_request_and_is_seen(make_engine, caplog):
    engine, model = slow_engine(make_engine, max_running=1)
    generations = [engine.submit(request_of(20, seed=seed)) for seed in range(3)]
    engine._scheduler._prompt_done = lambda active: 1 / 0
    model.gate.set()
    for generation in generations:
        with pytest.raises(GenerationError) as caught:
            tokens_of(generation)
        assert caught.value.kind == "failed"
    wait_for(lambda: not engine.healthy)
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(EngineClosedError, match="failed"):
        engine.submit(request_of(20))


def test_tokens_can_be_awaited(make_engine, expected):
    engine = make_engine()

    async def collect(request):
        return [event.token async for event in engine.submit(request)]

    async def both():
        return await asyncio.gather(collect(request_of(20)), collect(request_of(30)))

    assert asyncio.run(both()) == [expected(request_of(20)), expected(request_of(30))]


def test_a_task_that_is_cancelled_while_it_awaits_a_token_can_cancel_the_request(make_engine):
    engine, model = slow_engine(make_engine)

    async def run():
        generation = engine.submit(request_of(20))

        async def consume():
            try:
                async for _ in generation:
                    pass
            finally:
                generation.cancel()

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    model.gate.set()
    wait_for(lambda: engine.outstanding == 0 and engine.free_blocks == 64)


# --- everything at once ----------------------------------------------------------------------------------------------


class ErraticCache(FakeCache):
    """Answers, raises, hesitates, forgets and reports outages as its seed has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _hiccup(self) -> None:
        with self._lock:
            chance, pause = self._random.random(), self._random.random()
            if chance < 0.1 and self.chunks:
                del self.chunks[self._random.choice(list(self.chunks))]
            self.available = chance < 0.9
        if chance < 0.4:
            time.sleep(0.08 * pause)
        if 0.4 < chance < 0.55:
            raise ConnectionError("the pool is gone")

    def lookup(self, *args, **kwargs):
        self._hiccup()
        return super().lookup(*args, **kwargs)

    def retrieve(self, names, blocks, *, kv_caches, session=""):
        self._hiccup()
        scribble(blocks, kv_caches)
        return super().retrieve(names, blocks, kv_caches=kv_caches)

    def store(self, *args, **kwargs):
        self._hiccup()
        return super().store(*args, **kwargs)


@pytest.mark.parametrize("seed", range(3))
def test_under_an_erratic_cache_and_cancels_every_answer_is_right_and_no_block_is_lost(make_engine, expected, seed):
    chance = random.Random(seed)
    engine = make_engine(
        ErraticCache(seed), handoff=HandoffConfig(wait_ms=30), load_timeout_s=0.04, max_running=4, num_blocks=48
    )
    heads = [prompt_of(64, seed=head) for head in range(2)]
    requests = [
        GenerationRequest(
            prompt=chance.choice(heads)[: chance.randint(1, 64)] + prompt_of(chance.randint(1, 40), seed=index),
            max_tokens=chance.randint(1, 12),
            announced_prefix=chance.choice([0, 0, 64]),
        )
        for index in range(40)
    ]
    generations = [engine.submit(request) for request in requests]
    cancelled = set(chance.sample(range(40), 10))
    for index in cancelled:
        generations[index].cancel()
        time.sleep(0.01)
    for index, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        try:
            tokens = tokens_of(generation)
        except GenerationError:
            assert index in cancelled
        else:
            assert tokens == expected(request)
            assert generation.stats.cached_tokens + generation.stats.computed_tokens == len(request.prompt)
    wait_for(lambda: engine.free_blocks == 48)
    wait_for(lambda: engine._scheduler._lent_blocks == 0)
    assert engine.healthy
