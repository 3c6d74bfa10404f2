"""Engines of other shapes: other names of chunks, and memory above the pool."""

import pytest

from tests.vllm.servers import (
    BLOCK,
    CHUNK,
    LENGTH,
    WHOLE,
    cluster_file,
    running,
)


@pytest.fixture(scope="module")
def by_tokens(model, vllm_pool, plain, tmp_path_factory):
    """Names its chunks by tokens, has memory of its own above the pool, and leaves to compute what vLLM's own
    prefix cache leaves."""
    tiers = [{"kind": "local", "capacity": "64MiB"}, {"kind": "mooncake"}]
    options = {
        "cache": {"chunk_size": CHUNK, "hash_mode": "tokens", "tiers": tiers},
        "connector": {"recompute": "block"},
    }
    file = cluster_file(tmp_path_factory.mktemp("by tokens"), vllm_pool, model, {"prefill-0": {}}, **options)
    with running(file) as (server,):
        yield server


def test_token_mode(by_tokens, plain, new_prompt):
    server, prompt = by_tokens, new_prompt(LENGTH)
    assert server.store(prompt).cached == 0
    for salt, cached in ((None, WHOLE), ("tenant", 0), ("tenant", WHOLE)):
        server.forget_prefixes()
        assert server.store(prompt, **({"cache_salt": salt} if salt else {})).outcome == (
            cached,
            plain.tokens(prompt),
        )


def test_a_worker_with_memory_of_its_own_finds_there_what_the_pool_has_lost(
    by_tokens, plain, new_prompt, vllm_pool
):
    prompt = new_prompt(LENGTH)
    by_tokens.store(prompt)
    by_tokens.forget_prefixes()
    with vllm_pool.bare_client() as client:
        assert client.remove_by_regex("^pdc1/", True) > 0
    assert by_tokens.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))


def test_a_load_has_the_results_of_a_hit_in_vllms_own_cache_bit_for_bit(by_tokens, plain, new_prompt):
    """If both leave the same to compute. The second prompt ends behind its last whole chunk: another prompt
    with the same chunks, computed in the same pieces, leaves vLLM's own cache with just these."""
    server, own = by_tokens, plain.server()
    whole, longer = new_prompt(8 * CHUNK), new_prompt(LENGTH)
    for prompt, before, left in (
        (whole, whole, BLOCK),
        (longer, longer[:WHOLE] + new_prompt(LENGTH - WHOLE), LENGTH - WHOLE),
    ):
        server.store(prompt, 1)
        server.forget_prefixes()
        own.complete(before, 1)
        loaded, hit = (one.complete(prompt, logprobs=2) for one in (server, own))
        assert (loaded.cached, hit.cached) == (len(prompt) - left, len(prompt) - left)
        assert (loaded.tokens, loaded.logprobs, loaded.seconds_best) == (
            hit.tokens,
            hit.logprobs,
            hit.seconds_best,
        )
