"""What only a cache server shows: its death and return, one memory for several engines, and a vLLM that knows
nothing but its address. And two vLLM nodes that change their roles."""

import contextlib
import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pd_cache.cluster import load_config
from tests.pd_cache.vllm.histories import STREAM
from tests.support.adapter import write_adapter
from tests.support.pool import Node
from tests.support.waiting import wait_for
from tests.vllm.servers import (
    CACHE,
    CHUNK,
    LENGTH,
    WHOLE,
    PdCacheServer,
    Server,
    before,
    begun,
    by_hand,
    cache_server,
    cluster_file,
    connector,
    metric_at,
)

TIERS = {"chunk_size": CHUNK, "tiers": [{"kind": "local", "capacity": "64MiB"}, {"kind": "mooncake"}]}


def server_of(file):
    """Where the cache server of a file listens, and where its metrics are."""
    config = load_config(file)
    node = config.node(CACHE)
    return config.server_url(node), f"http://127.0.0.1:{node.metrics_port}"


class Sharing(NamedTuple):
    """Two engines of a host that prefill and decode, and the cache server between them, which has memory of
    its own. The engines serve adapters."""

    file: Path
    cache: Node
    by_hand: Server
    """Knows nothing but the server's address, so its `connector.load` is `auto`."""
    launched: PdCacheServer


@pytest.fixture(scope="module")
def sharing(model, vllm_pool, plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharing")
    args = {"enable-lora": True}
    file = cluster_file(
        folder, vllm_pool, model, {"both-0": {}, "both-1": {}}, mode="server", cache=TIERS, args=args
    )
    ours = {"kv_connector_module_path": "pd_cache.vllm.connector", "kv_load_failure_policy": "recompute"}
    flag = connector("PdCacheConnector", "kv_producer", {"server_url": server_of(file)[0]}, **ours)
    by_flags = by_hand(model, flag, "--enable-lora", "--async-scheduling")
    with cache_server(file) as cache, begun(by_flags) as server:
        launched = PdCacheServer("both-0", file)
        try:
            launched.wait_ready()
            yield Sharing(file, cache, server(), launched)
        finally:
            launched.node.stop(timeout=180)


def test_an_engines_hit_on_what_another_has_computed_comes_from_the_servers_memory(
    sharing, plain, new_prompt
):
    _, metrics = server_of(sharing.file)
    prompt = new_prompt(LENGTH)

    def stored():
        """The server's own client of the pool may have to open first."""
        sharing.by_hand.forget_prefixes()
        sharing.by_hand.store(prompt, 1)
        return metric_at(metrics, "pd_cache_tokens_total", op="store", outcome="stored") >= WHOLE

    wait_for(stored, "the prompt in the pool")
    before = {
        tier: metric_at(metrics, "pd_cache_tier_hits_total", tier=tier) for tier in ("local", "mooncake")
    }
    assert sharing.launched.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))
    assert metric_at(metrics, "pd_cache_tier_hits_total", tier="local") == before["local"] + WHOLE // CHUNK
    assert metric_at(metrics, "pd_cache_tier_hits_total", tier="mooncake") == before["mooncake"]


def test_a_stream_loads_through_the_server_and_the_request_finds_it_at_hand(sharing, plain, new_prompt):
    """A prefetch is such a stream."""
    prompt, node = new_prompt(LENGTH), sharing.launched
    sharing.by_hand.store(prompt, 1)
    before = node.loaded
    with node.abandoned(prompt, 1, kv_transfer_params=STREAM):
        wait_for(lambda: node.loaded - before == WHOLE, "it is loaded")
    answer = node.complete(prompt)
    assert (answer.tokens, node.loaded - before) == (plain.tokens(prompt), WHOLE)
    report = (answer.kv_transfer_params or {})["pd_cache"]["report"]
    assert (report["at_hand"], report["loaded"]) == (WHOLE, 0)


def test_a_producer_loads_under_asynchronous_scheduling(sharing, plain, new_prompt):
    """To vLLM it is no producer any more: it would give the blocks of a running load to another request."""
    server, prompts = sharing.by_hand, [new_prompt(LENGTH) for _ in range(4)]
    for prompt in prompts:
        server.store(prompt, 1)
    server.forget_prefixes()
    answers = server.complete_all(prompts)
    assert [answer.tokens for answer in answers] == [plain.tokens(prompt) for prompt in prompts]
    assert sum(answer.cached for answer in answers) >= 3 * WHOLE, (
        "it declines none before three were measured"
    )


@contextlib.contextmanager
def stopped(server):
    """The server and its engine, a group of processes, stand still while the block runs."""
    port = int(server.url.rpartition(":")[2])
    sockets = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    group = os.getpgid(next(one.pid for one in sockets if one.laddr.port == port))
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def test_vllm_takes_a_stopped_nodes_role_and_gives_it_back_and_each_token_stays_right(
    sharing, plain, new_prompt
):
    urls = {"both-0": sharing.launched.url, "both-1": sharing.by_hand.url}
    prompts, stop, answers = [new_prompt(LENGTH) for _ in range(3)], threading.Event(), []

    def ask(first):
        for prompt in itertools.islice(itertools.cycle(prompts), first, None):
            tokens = [token for event in proxy.stream(prompt, 32) for token in event]
            answers.append(tokens == plain.tokens(prompt, 32))
            if stop.is_set():
                return

    def does():
        return [role["does"] for _, role in sorted(proxy.ask("/health")["roles"].items())]

    def answered():
        count = len(answers)
        wait_for(lambda: len(answers) > count + 2, "answers")

    for prompt in prompts:
        plain.tokens(prompt, 32)
    with (
        before(sharing.file, urls, direct_tokens=0, roles={"auto": True}) as proxy,
        ThreadPoolExecutor(4) as threads,
    ):
        second = max(sharing.by_hand, sharing.launched, key=lambda server: server.url)
        try:
            wait_for(lambda: does() == ["prefill", "decode"], "each does something else")
            asking = [threads.submit(ask, number) for number in range(2)]
            answered()
            with stopped(second):
                wait_for(lambda: does() == ["decode", "decode"], "the first takes the place of the second")
                asking += [threads.submit(ask, number) for number in range(2)]
                answered()
            wait_for(lambda: does() == ["prefill", "decode"], "each does again what it did")
            answered()
        finally:
            stop.set()
        for client in asking:
            client.result()
        assert all(answers)
        assert not proxy.metric("pd_cache_proxy_answers_cut_total")


def serve_adapter(server, adapter, folder, new_prompt):
    """Waits until the connector knows the adapter's digest. Until then each request with it is counted."""
    server.ask("/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": str(folder)})

    def uncounted():
        before = server.metric("vllm:pd_cache_troubles_total", op="lookup")
        server.store(new_prompt(CHUNK), 1, model=adapter)
        return server.metric("vllm:pd_cache_troubles_total", op="lookup") == before

    wait_for(uncounted, f"the digest of {adapter}")


def test_adapters_of_one_name_and_path_share_if_their_weights_are_the_same(
    sharing, model, new_prompt, tmp_path
):
    """The files are written again between the two loads, as if each engine had a machine of its own."""
    first, second, prompt = sharing.by_hand, sharing.launched, new_prompt(LENGTH)
    plain = first.complete(prompt)
    tokens = []
    for name, other_seed, cached in (("same", 1, WHOLE), ("other", 2, 0)):
        folder = write_adapter(tmp_path / name, model, seed=1)
        serve_adapter(first, name, folder, new_prompt)
        answer = first.store(prompt, model=name)
        assert answer.cached == 0, "neither the model's KV nor, in vLLM's own hashes, that of another name"

        write_adapter(folder, model, seed=other_seed)
        serve_adapter(second, name, folder, new_prompt)
        again = second.complete(prompt, model=name)
        assert again.cached == cached
        assert (again.tokens == answer.tokens) == bool(cached), (
            "a node computes with the weights that it has loaded"
        )
        tokens.append(answer.tokens)
    assert tokens[0] == tokens[1] != plain.tokens

    write_adapter(tmp_path / "same", model, seed=3)
    first.forget_prefixes()
    known = first.metric("vllm:pd_cache_troubles_total", op="lookup", reason="adapter_changed")

    def changed():
        """The files are looked at while the first request after the change computes."""
        first.complete(new_prompt(CHUNK), 1, model="same")
        return first.metric("vllm:pd_cache_troubles_total", op="lookup", reason="adapter_changed") > known

    wait_for(changed, "the change of the adapter's files is found out")
    assert first.complete(prompt, model="same").cached == 0


def test_the_server_is_killed_and_comes_back_and_no_engine_is_restarted(sharing, plain, new_prompt):
    server, prompt = sharing.launched, new_prompt(LENGTH)
    assert server.store(prompt).tokens == plain.tokens(prompt)
    server.forget_prefixes()
    assert server.complete(prompt).outcome == (WHOLE, plain.tokens(prompt))

    with server.abandoned(new_prompt(LENGTH)):
        wait_for(lambda: server.blocks_in_use)
        sharing.cache.kill()
    server.settle()
    other = new_prompt(LENGTH)
    assert server.complete(other).outcome == (0, plain.tokens(other))

    with cache_server(sharing.file):

        def hit():
            server.forget_prefixes()
            return server.complete(prompt).cached == WHOLE

        wait_for(hit, "a hit after the restart")
        assert server.complete(prompt).tokens == plain.tokens(prompt)
