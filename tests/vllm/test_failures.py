"""The cache may fail in any way: requests are answered, with the right tokens, and every block is given
back."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.pd_cache.vllm.histories import announced
from tests.support.waiting import wait_for
from tests.vllm.servers import (
    CHUNK,
    LENGTH,
    SHARDS,
    WHOLE,
    before,
    cluster_file,
    running,
)


def store(pool, server, prompt, held=0):
    """Until the pool holds all of it beyond its first `held` tokens: a put may fail on a machine that is busy
    for a second."""
    before = pool.keys()

    def stored():
        server.store(prompt, 1)
        if len(pool.keys() - before) >= (len(prompt) - held) // CHUNK * SHARDS:
            return True
        server.forget_prefixes()
        return False

    wait_for(stored, "the prompt in the pool")


def test_a_corrupt_object_is_computed_again_and_never_used(pair, plain, new_prompt, vllm_pool):
    prompt = new_prompt(LENGTH)
    store(vllm_pool, pair.a, first_half := prompt[: 8 * CHUNK])
    before = vllm_pool.keys()
    store(vllm_pool, pair.a, prompt, len(first_half))
    corrupted = sorted(vllm_pool.keys() - before)
    assert len(corrupted) == (WHOLE - len(first_half)) // CHUNK * SHARDS
    vllm_pool.damage(*corrupted)
    counted = pair.b.troubles("retrieve", "corrupt")
    answer = pair.b.complete(prompt)
    assert answer.tokens == plain.tokens(prompt)
    assert pair.b.troubles("retrieve", "corrupt") == counted + 1, "the first of them ends the load"
    pair.b.settle()


def test_a_client_that_goes_away_while_its_prompt_is_loaded(pair, plain, new_prompt, vllm_pool):
    prompt = new_prompt(LENGTH)
    store(vllm_pool, pair.a, prompt)
    with vllm_pool.nodes["store-0"].stopped():
        with pair.b.abandoned(prompt):
            wait_for(lambda: pair.b.blocks_in_use)
        assert pair.b.blocks_in_use, "a transfer may still write to staging: its end is waited for"
    pair.b.settle()
    assert pair.b.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))


def test_a_load_that_outlives_its_deadline_is_computed(pair, plain, new_prompt, vllm_pool):
    """The memory node neither answers nor dies: a transfer is given up at its deadline, and the load with
    it."""
    prompt = new_prompt(LENGTH)
    store(vllm_pool, pair.a, prompt)
    failed = pair.b.metric("vllm:pd_cache_troubles_total", op="retrieve")
    with vllm_pool.nodes["store-0"].stopped():
        answer = pair.b.complete(prompt)
        assert answer.tokens == plain.tokens(prompt)
        wait_for(lambda: pair.b.metric("vllm:pd_cache_troubles_total", op="retrieve") > failed)
    pair.b.settle()


def test_a_client_that_goes_away_while_its_prompt_is_stored(pair, plain, new_prompt, vllm_pool):
    prompt = new_prompt(LENGTH)
    with vllm_pool.nodes["store-0"].stopped():
        with pair.a.abandoned(prompt):
            wait_for(lambda: pair.a.blocks_in_use)
        assert pair.a.complete(other := new_prompt(100)).tokens == plain.tokens(other), (
            "the engine serves on meanwhile"
        )
    pair.a.settle()
    assert pair.a.store(prompt).tokens == plain.tokens(prompt)


def test_the_memory_node_is_killed_between_lookup_and_load(pair, plain, new_prompt, vllm_pool):
    prompt = new_prompt(LENGTH)
    store(vllm_pool, pair.a, prompt)
    hits = pair.b.metric("vllm:pd_cache_tokens_total", op="lookup", outcome="hit")
    failed = pair.b.metric("vllm:pd_cache_troubles_total", op="retrieve")
    vllm_pool.kill("store-0")
    try:
        # for some seconds the master does not know, and still promises the chunks
        answer = pair.b.complete(prompt)
        assert answer.tokens == plain.tokens(prompt)
        wait_for(lambda: pair.b.metric("vllm:pd_cache_troubles_total", op="retrieve") > failed)
        assert pair.b.metric("vllm:pd_cache_tokens_total", op="lookup", outcome="hit") == hits + WHOLE
        pair.b.settle()
    finally:
        vllm_pool.start("store-0")


def test_requests_are_served_while_the_master_is_gone_and_hit_again_when_it_is_back(
    pair, plain, new_prompt, vllm_pool
):
    prompt = new_prompt(LENGTH)
    vllm_pool.kill("master")
    try:
        for server in (pair.a, pair.b):
            for _ in range(3):
                other = new_prompt(LENGTH)
                answer = server.complete(other)
                assert answer.tokens == plain.tokens(other)
            server.settle()
        reasons = ("pool_down", "timeout", "weights_unnamed")
        assert all(sum(one.troubles("lookup", reason) for reason in reasons) > 0 for one in pair)
    finally:
        vllm_pool.start("master")

    def hit():
        pair.a.forget_prefixes()
        pair.a.complete(prompt, 1)
        return pair.b.complete(prompt).cached == WHOLE

    wait_for(hit)
    assert pair.b.complete(prompt).tokens == plain.tokens(prompt)


@pytest.fixture(scope="module")
def cramped(model, vllm_pool, plain, tmp_path_factory):
    """Of the pair's namespace. It stores what it generates, loads what is worth it, and has memory above the
    pool, so that its own loads say nothing about the pool's. It has 28 blocks of 32 tokens."""
    tiers = [{"kind": "local", "capacity": "64MiB"}, {"kind": "mooncake"}]
    options = {
        "cache": {"chunk_size": CHUNK, "shards": SHARDS, "tiers": tiers},
        "connector": {"store_generated": True, "load": "auto"},
        "args": {"num-gpu-blocks-override": 28, "max-model-len": 800},
        "mode": "server",
    }
    file = cluster_file(tmp_path_factory.mktemp("cramped"), vllm_pool, model, {"prefill-0": {}}, **options)
    with running(file) as (server,):
        yield server


def test_damaged_chunks_in_an_engine_with_few_blocks_are_neither_answered_nor_stored_on(
    cramped, plain, pair, new_prompt, vllm_pool
):
    server, prompt = cramped, new_prompt(700)
    store(vllm_pool, pair.a, prompt)
    assert server.complete(prompt).outcome == (700 // CHUNK * CHUNK, plain.tokens(prompt))

    before = vllm_pool.keys()
    store(vllm_pool, pair.a, prompt := new_prompt(4 * CHUNK))
    bad = vllm_pool.keys() - before
    vllm_pool.damage(*bad)
    longer = [prompt + new_prompt(150) for _ in range(3)]
    answers = server.complete_all(longer)
    assert [answer.tokens for answer in answers] == [plain.tokens(one) for one in longer]
    assert server.troubles("retrieve", "corrupt") >= 1
    server.settle()

    # what was stored behind the bad chunks is good: with those replaced, another node takes all of it
    vllm_pool.remove(*bad)
    store(vllm_pool, pair.a, prompt)
    for one in longer:
        assert pair.b.complete(one).outcome == (len(one) // CHUNK * CHUNK, plain.tokens(one))


def test_preemption_under_a_tiny_kv_cache(cramped, plain, new_prompt):
    """28 blocks of 32 tokens for eight requests of 280 and 48 more, which complete a chunk: three fit until
    they have grown by eight tokens."""
    prompts = [new_prompt(280) for _ in range(8)]
    for _ in range(2):
        answers = cramped.complete_all(prompts, 48)
        assert [answer.tokens for answer in answers] == [plain.tokens(prompt, 48) for prompt in prompts]
        cramped.settle()
    assert cramped.metric("vllm:num_preemptions_total") > 0
    assert cramped.loaded > 0


def slowly(pool, server, prompt):
    """The answer, if its load takes more than a second."""
    with ThreadPoolExecutor(1) as thread, pool.nodes["store-0"].stopped():
        asked = thread.submit(server.complete, prompt)
        wait_for(lambda: server.blocks_in_use or asked.done(), "it is loaded or computed")
        time.sleep(1)
    return asked.result()


def report_of(answer):
    return answer.kv_transfer_params["pd_cache"]["report"]


def declines(server):
    (weights,) = server.ask("/health")["weights"]
    return weights["declines"]


@pytest.fixture
def behind_a_slow_link(cramped, plain, pair, new_prompt, vllm_pool):
    """It loads 64 tokens a second, where any machine computes hundreds. It says so of hand-offs."""
    while declines(cramped) <= 10 * CHUNK:
        cramped.store(new_prompt(768), 1)  # in steps that are measured
        store(vllm_pool, pair.a, prompt := new_prompt(CHUNK + 1))
        assert slowly(vllm_pool, cramped, prompt).tokens == plain.tokens(prompt)
    return cramped


def test_over_a_slow_link_a_prefix_is_computed_and_so_is_a_hand_off(
    behind_a_slow_link, plain, pair, new_prompt, vllm_pool
):
    server, length = behind_a_slow_link, 10 * CHUNK

    def metric():
        return server.metric("vllm:pd_cache_loads_declined_tokens_total")

    declined = metric()
    for params in (None, announced(length)):
        store(vllm_pool, pair.a, prompt := new_prompt(length + 1))
        answer = server.complete(prompt, kv_transfer_params=params)
        assert answer.tokens == plain.tokens(prompt)
        report = report_of(answer)
        assert (report["found"], report["reason"]) == (length, "not_worth")
        assert report["detail"].startswith(f"{length} tokens would load in ")
        assert report["loaded"] <= CHUNK, "no more than may correct the figure"
        declined += length - report["loaded"]
    wait_for(lambda: metric() == declined, "what was declined is counted")


def test_a_decode_node_behind_a_slow_link_gets_prompts_alone_and_another_one_does_not(
    behind_a_slow_link, model, plain, pair, new_prompt, vllm_pool, tmp_path
):
    prefill, slow, near, length = pair.a, behind_a_slow_link, pair.b, 10 * CHUNK
    urls = {"prefill-0": prefill.url, "decode-0": slow.url, "decode-1": near.url}
    file = cluster_file(tmp_path, vllm_pool, model, {name: {} for name in urls})
    computed, asked = prefill.metric("vllm:prompt_tokens_total"), Counter()
    with before(file, urls, direct_tokens=CHUNK) as proxy:
        while len(asked) < 2:  # they take turns
            prompt, name = new_prompt(length + 1), f"slow-{asked.total()}"
            assert proxy.complete(prompt, headers={"X-Request-Id": name}).tokens == plain.tokens(prompt)
            *others, hop = proxy.ask(f"/requests/{name}")["hops"]
            asked[hop["node"]] += 1
            alone = hop["node"] == slow.url
            assert [other["node"] for other in others] == ([] if alone else [prefill.url])
            assert hop.get("direct") == ("not_worth" if alone else None)
            assert hop["report"]["loaded"] == (0 if alone else length)
        went = {
            result: proxy.metric("pd_cache_proxy_handoffs_total", result=result)
            for result in ("not_worth", "handed_over")
        }
    assert went == {"not_worth": asked[slow.url], "handed_over": asked[near.url]}
    assert prefill.metric("vllm:prompt_tokens_total") == computed + asked[near.url] * (length + 1)
