"""Engines of other shapes: other names of chunks, memory above the pool, and a whole cluster from one file."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launch.up import quiet
from launch.up import running as running_cluster
from pd_cache.cluster import read_config
from tests.support.pool import ROOT
from tests.support.waiting import wait_for
from tests.vllm.servers import (
    ARGS,
    BLOCK,
    CHUNK,
    ENV,
    LENGTH,
    PROGRAM,
    WHOLE,
    NewPrompt,
    PdCacheServer,
    Reference,
    Server,
    cluster_file,
    running,
)


@pytest.fixture(scope="module")
def by_tokens(model, vllm_pool, plain, tmp_path_factory):
    """Names its chunks by tokens, has memory of its own above the pool, and leaves to compute what vLLM's own prefix cache leaves."""
    tiers = [{"kind": "local", "capacity": "64MiB"}, {"kind": "mooncake"}]
    options: dict[str, Any] = {
        "cache": {"chunk_size": CHUNK, "hash_mode": "tokens", "tiers": tiers},
        "connector": {"recompute": "block"},
    }
    file = cluster_file(tmp_path_factory.mktemp("by tokens"), vllm_pool, model, {"prefill-0": {}}, **options)
    with running(file) as (server,):
        yield server


def test_token_mode(by_tokens: PdCacheServer, plain: Reference, new_prompt: NewPrompt) -> None:
    server, prompt = by_tokens, new_prompt(LENGTH)
    assert server.store(prompt).cached == 0
    for salt, cached in ((None, WHOLE), ("tenant", 0), ("tenant", WHOLE)):
        server.forget_prefixes()
        assert server.store(prompt, **({"cache_salt": salt} if salt else {})).outcome == (cached, plain.tokens(prompt))


def test_a_worker_with_memory_of_its_own_finds_there_what_the_pool_has_lost(by_tokens, plain, new_prompt, vllm_pool):
    prompt = new_prompt(LENGTH)
    by_tokens.store(prompt)
    by_tokens.forget_prefixes()
    with vllm_pool.bare_client() as client:
        assert client.remove_by_regex("^pdc1/", True) > 0
    assert by_tokens.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))


def test_a_load_has_the_results_of_a_hit_in_vllms_own_cache_bit_for_bit(by_tokens, plain, new_prompt):
    """If both leave the same to compute. The second prompt ends behind its last whole chunk: another prompt with the same chunks, computed
    in the same pieces, leaves vLLM's own cache with just these."""
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
        assert (loaded.tokens, loaded.logprobs, loaded.seconds_best) == (hit.tokens, hit.logprobs, hit.seconds_best)


def test_a_stream_through_the_proxy_of_a_cluster_from_one_file(model, plain, new_prompt, tmp_path):
    tree = yaml.safe_load((ROOT / "configs" / "vllm-local.yaml").read_text())
    tree["engine"] |= {"model": str(model), "executable": PROGRAM[0]}
    tree["engine"]["args"] |= {**ARGS, "max-model-len": 8192, "block-size": 128}
    tree["engine"]["env"] |= ENV
    tree["nodes"][1]["segment_size"] = "256MiB"
    # no deadline is met too late because the machine is busy
    tree["transfer"]["timeouts"] = {"exist_ms": 10_000}
    tree["connector"] |= {"lookup_timeout_ms": 10_000, "load_timeout_ms": 60_000}
    tree["handoff"]["wait_ms"] = 60_000
    file = tmp_path / "vllm-local.yaml"
    file.write_text(yaml.safe_dump(tree))
    config, source = read_config(file)
    with running_cluster(config, source, sink=quiet) as cluster:
        proxy, decode = Server(cluster.urls["proxy"]), Server(cluster.urls["decode-0"])
        for prompt in (new_prompt(900), new_prompt(100)):
            events = proxy.stream(prompt, 12)
            assert len(events) > 6, "tokens come as they are made"
            assert [token for event in events for token in event] == plain.tokens(prompt, 12)

        assert decode.loaded == 768
        handoffs = "pd_cache_proxy_handoffs_total"
        assert (proxy.metric(handoffs, result="handed_over"), proxy.metric(handoffs, result="short")) == (1, 1)

        assert decode.ask("/health")["namespace"]["hash_mode"] == "blocks"
        # words that do not begin with a special token, t0 to t2, which the tokenizer would cut off
        text = " ".join(f"t{3000 + token % 1000}" for token in new_prompt(1000))
        wait_for(lambda: proxy.ask("/health")["lookups"] == "on", 30, "the proxy looks into the pool")
        answers = [proxy.chat(text), decode.chat(text)]
        assert answers[0] == answers[1] != ""
        assert decode.loaded == 2 * 768
        before: list[float] = []

        def past_prefill() -> bool:
            """A lookup of the proxy's own has 0.6 s, which a busy machine may not give it."""
            before.append(decode.loaded)
            decode.forget_prefixes()
            assert proxy.chat(text) == answers[0]
            return proxy.metric(handoffs, result="in_pool") == 1

        wait_for(past_prefill, what="what the pool holds needs no prefill node")
        assert decode.loaded == before[-1] + 768

        decode.forget_prefixes()
        payload = {"messages": [{"role": "user", "content": text}]}
        action = {"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        (told,) = proxy.ask("/hints", hints)["actions"]
        assert (told["status"], told["node"]) == ("accepted", decode.url), told
        wait_for(lambda: decode.loaded == before[-1] + 2 * 768, what="it is loaded before its request comes")
        assert proxy.chat(text) == answers[0]
        assert decode.loaded == before[-1] + 2 * 768, "the request finds it in vLLM's own cache"
        decode.settle()
