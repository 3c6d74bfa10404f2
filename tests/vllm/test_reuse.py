"""What one vLLM computed, another need not: right tokens, and exactly the whole chunks from the pool."""

import time

from tests.pd_cache.vllm.histories import STREAM, announced
from tests.support.cli import cli
from tests.support.waiting import wait_for
from tests.vllm.servers import (
    CHUNK,
    GPU,
    HANDOFF_MS,
    LENGTH,
    SHARDS,
    WHOLE,
    whole_chunks,
)


def reason_of(answer):
    """Why the cache did not have more of the prompt."""
    return str(answer.kv_transfer_params["pd_cache"]["report"]["reason"])


def stored(pair, prompt):
    """Have A compute a prompt, and wait until its chunks are in the pool."""
    before = pair.a.metric("vllm:pd_cache_tokens_total", op="store", outcome="stored")
    pair.a.store(prompt, 1)
    after = pair.a.metric("vllm:pd_cache_tokens_total", op="store", outcome="stored")
    assert after - before == whole_chunks(len(prompt))


def test_what_a_stores_b_takes_from_the_pool(pair, plain, new_prompt):
    prompt = new_prompt(LENGTH)
    assert pair.a.store(prompt).outcome == (0, plain.tokens(prompt))
    pair.b.complete(new_prompt(200), 1)  # so that it knows of resets in earlier tests
    lookups = pair.b.metric("vllm:pd_cache_ops_total", op="lookup")
    assert pair.b.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))
    assert pair.b.metric("vllm:pd_cache_ops_total", op="lookup") == lookups + 1, (
        "asked for once, however many steps it took"
    )


def report(server, prompt, request_id):
    """The report on a request, in its answer and on the page of the node."""
    told = (server.complete(prompt, 2, {"X-Request-Id": request_id}).kv_transfer_params or {})["pd_cache"][
        "report"
    ]
    assert server.ask(f"/requests/{request_id}")["reports"] == [told]
    return dict(told)


def test_each_answer_and_the_nodes_page_say_where_the_prompt_was_found_and_why_not_more(pair, new_prompt):
    prompt = new_prompt(LENGTH)
    first = report(pair.a, prompt, "first")
    assert (first["asked"], first["computed"], first["reason"]) == (1000, 1000, "never_stored")
    pair.a.settle()
    second = report(pair.b, prompt, "second")
    assert (second["found"], second["loaded"], second["pool"], second["reason"]) == (
        WHOLE,
        WHOLE,
        WHOLE,
        "none",
    )
    again = report(pair.a, prompt, "again")
    assert again["at_hand"] > 0, "vLLM's own cache has it"
    assert again["at_hand"] + again["loaded"] + again["computed"] == 1000
    short = report(pair.b, new_prompt(CHUNK - 1), "short")
    assert (short["computed"], short["reason"]) == (CHUNK - 1, "too_short")
    assert pair.b.metric("vllm:pd_cache_requests_total", reason="too_short") >= 1
    assert pair.a.metric("vllm:pd_cache_missed_tokens_total", reason="never_stored") >= 1000


def test_what_vllm_has_stored_is_found_whole_after_a_copy_to_another_pool_and_back(
    pair, plain, new_prompt, vllm_pool, make_pool
):
    prompt = new_prompt(LENGTH)
    stored(pair, prompt)
    keys, other = vllm_pool.keys(), make_pool(segment="1GiB").start()
    cli("pool", "copy", "-c", vllm_pool.file, "--to", other.file, "--rate", "1GiB")
    assert keys <= other.keys()
    cli("pool", "rm", "*", "-c", vllm_pool.file, "--yes")
    assert not keys & vllm_pool.keys()
    cli("pool", "copy", "-c", other.file, "--to", vllm_pool.file, "--rate", "1GiB")
    assert pair.b.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))


def test_a_producer_reuses_what_the_pool_has_and_computes_the_tail(pair, plain, new_prompt):
    prefix = new_prompt(500)
    stored(pair, prefix)
    pair.a.forget_prefixes()
    prompt = prefix + new_prompt(300)
    assert pair.a.complete(prompt).outcome == (whole_chunks(500), plain.tokens(prompt))


def test_chunks_of_a_long_prompt_are_stored_while_it_is_computed(pair, plain, new_prompt, vllm_pool):
    """Steps have 256 tokens here: four chunks are complete after the first of eight."""
    prompt = new_prompt(2000)
    before, deadline = len(vllm_pool.keys()), time.monotonic() + 60
    with pair.a.abandoned(prompt, 40):
        while (early := len(vllm_pool.keys()) - before) == 0:  # one listing: all may be there a moment later
            assert time.monotonic() < deadline
    assert 0 < early < 2000 // CHUNK * SHARDS
    pair.a.settle()
    stored_so_far = pair.b.complete(prompt).cached
    assert 0 < stored_so_far <= whole_chunks(2000)
    assert pair.a.store(prompt).tokens == plain.tokens(prompt)
    assert pair.b.complete(prompt).outcome == (whole_chunks(2000), plain.tokens(prompt))


def test_tenants_of_different_salt_share_nothing(pair, plain, new_prompt):
    prompt = new_prompt(400)
    pair.a.store(prompt, cache_salt="one")
    for salt, cached in (("two", 0), ("one", whole_chunks(400))):
        assert pair.b.complete(prompt, cache_salt=salt).outcome == (cached, plain.tokens(prompt))
    assert pair.b.complete(prompt).cached == 0


def test_the_prefill_node_tells_what_it_stores_and_the_decode_node_waits_for_it(
    pair, plain, new_prompt, vllm_pool
):
    prompt = new_prompt(700)
    remote = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    handed = pair.a.complete(prompt, 1, kv_transfer_params=remote).kv_transfer_params
    ours = handed["pd_cache"]
    assert ours["prefix_tokens"] == whole_chunks(700)
    assert ours["prefill"] == {"cached_tokens": 0, "computed_tokens": 700, "reason": "never_stored"}
    before = pair.b.loaded
    assert pair.b.complete(prompt, kv_transfer_params=handed).tokens == plain.tokens(prompt)
    assert pair.b.loaded - before == whole_chunks(700)

    # announced, but never stored: the decode node waits until its deadline, and computes
    start = time.monotonic()
    answer = pair.b.complete(other := new_prompt(700), kv_transfer_params=handed)
    assert answer.tokens == plain.tokens(other)
    assert reason_of(answer) == "deadline"
    assert time.monotonic() - start > 0.95 * HANDOFF_MS / 1000
    # stored in another namespace: no use to wait
    foreign = {**handed, "pd_cache": {**ours, "namespace": "0123456789abcdef"}}
    answer = pair.b.complete(other := new_prompt(700), kv_transfer_params=foreign)
    assert answer.tokens == plain.tokens(other)
    assert reason_of(answer) == "other_namespace"
    assert pair.b.troubles("lookup", "other_namespace") >= 1


def test_statistics_reach_vllms_prometheus(pair, new_prompt):
    prompt = new_prompt(6 * CHUNK + 5)
    stored(pair, prompt)
    before = pair.b.metric("vllm:pd_cache_bytes_total", op="retrieve")
    pair.b.complete(prompt)
    tokens = 6 * CHUNK
    # layers, K and V, KV heads, head dimension, bytes of a number
    per_token = 4 * 2 * 4 * 32 * (2 if GPU else 4)
    assert pair.b.metric("vllm:pd_cache_bytes_total", op="retrieve") - before == tokens * per_token
    for op in ("lookup", "retrieve"):
        assert pair.b.metric("vllm:pd_cache_ops_total", op=op) > 0
        assert pair.b.metric("vllm:pd_cache_op_seconds_total", op=op) > 0
    for node, op in ((pair.b, "load"), (pair.a, "compute")):  # by which `connector.load: auto` decides
        assert node.metric("vllm:pd_cache_measured_tokens_total", op=op) >= tokens
        assert node.metric("vllm:pd_cache_measured_seconds_total", op=op) > 0
    assert pair.a.metric("vllm:pd_cache_op_seconds_total", op="store") > 0
    assert pair.b.metric("vllm:external_prefix_cache_hits_total") > 0


def test_a_stream_loads_what_appears_and_the_request_that_is_answered_finds_it_at_hand(
    pair, plain, new_prompt
):
    prompt, node = new_prompt(1500), pair.a
    stored(pair, prompt[:500])
    node.forget_prefixes()
    whole, first = whole_chunks(1500), whole_chunks(500)

    before = node.loaded
    with node.abandoned(prompt, 1, kv_transfer_params=STREAM):
        wait_for(lambda: node.loaded - before == first, "what the pool has")
        node.complete(prompt, 1)  # computes and stores the rest, as a prefill node would
        wait_for(lambda: node.loaded - before == whole, "what was stored meanwhile")
        answer = node.complete(prompt, kv_transfer_params=announced(whole))
    assert answer.tokens == plain.tokens(prompt)
    report = (answer.kv_transfer_params or {})["pd_cache"]["report"]
    assert (report["streamed"], report["at_hand"], report["loaded"]) == (whole, 1472, 0), (
        "46 blocks of 32 tokens"
    )
    node.settle()
