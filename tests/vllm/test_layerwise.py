"""`load: layerwise`: the forward pass runs while its KV arrives. Whatever happens to a load then, no token changes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.waiting import wait_for
from tests.vllm.servers import CHUNK, PdCacheServer, Reference, cluster_file, running
from tests.vllm.test_failures import all_free, corrupt, stopped, store

NewPrompt = Callable[[int], list[int]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STORED = 8 * CHUNK
REST = 300
"""Tokens behind those that are in the pool: more than a step has."""


@pytest.fixture(scope="module")
def server(
    model: Path, vllm_pool: Pool, plain: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PdCacheServer]:
    """Stores prompts, and loads them layer by layer: here each layer of a shard of a chunk is a part of its own. Gives up loads after 4 s."""
    folder = tmp_path_factory.mktemp("layerwise")
    connector = {"load": "layerwise", "load_timeout_ms": 4000}
    timeouts = {"exist_ms": 10_000, "get_ms": 4000, "put_ms": 20_000}
    transfer = {"staging_size": "32MiB", "prefault": False, "timeouts": timeouts}
    file = cluster_file(folder, vllm_pool, model, {"prefill-0": {}}, connector=connector, transfer=transfer)
    with running(file, "prefill-0") as (one,):
        yield one


def by_layers(server: PdCacheServer) -> float:
    """How many tokens were loaded layer by layer."""
    return server.metric("vllm:pd_cache_tokens_total", op="retrieve", outcome="by_layers")


def half_stored(server: PdCacheServer, pool: Pool, new_prompt: NewPrompt) -> tuple[list[int], set[str]]:
    """A prompt whose first part is in the pool and not in vLLM's own cache, and the keys of that part."""
    before = pool.keys()
    store(pool, server, prompt := new_prompt(STORED))
    keys = pool.keys() - before
    server.forget_prefixes()
    return prompt + new_prompt(REST), keys


def test_a_prompt_is_computed_while_its_beginning_arrives(
    server: PdCacheServer, plain: Reference, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    before = by_layers(server)
    prompt, _ = half_stored(server, vllm_pool, new_prompt)
    answer = server.complete(prompt)
    assert (answer.cached, answer.tokens) == (STORED, plain.tokens(prompt))
    assert by_layers(server) == before + STORED
    all_free(server)

    # what was computed behind it is in the pool, too, and the whole is in vLLM's own cache
    assert server.complete(prompt).cached >= len(prompt) // CHUNK * CHUNK
    server.forget_prefixes()
    answer = server.complete(longer := prompt + new_prompt(CHUNK))
    assert (answer.cached, answer.tokens) == (len(prompt) // CHUNK * CHUNK, plain.tokens(longer))
    all_free(server)


def test_a_whole_prompt_of_which_only_a_token_is_left_is_loaded_before_its_step(
    server: PdCacheServer, plain: Reference, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    """The last block would be loaded and computed at the same time."""
    store(vllm_pool, server, prompt := new_prompt(STORED))
    server.forget_prefixes()
    before = by_layers(server)
    answer = server.complete(prompt)
    assert (answer.cached, answer.tokens) == (STORED - 1, plain.tokens(prompt))
    assert by_layers(server) == before
    all_free(server)


def test_damage_in_the_last_layer_is_found_when_all_is_computed_and_changes_no_token(
    server: PdCacheServer, plain: Reference, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    """Also of requests that begin while the first one is computed again, and of those that come when it is aborted meanwhile."""
    prompt, keys = half_stored(server, vllm_pool, new_prompt)
    corrupt(vllm_pool, *keys, byte=-100)
    others = [prompt[:STORED] + new_prompt(REST) for _ in range(3)]
    answers = server.complete_all([prompt, *others])
    assert [one.tokens for one in answers] == [plain.tokens(one) for one in (prompt, *others)]
    assert server.troubles("retrieve", "corrupt") >= 1
    all_free(server)

    prompt, keys = half_stored(server, vllm_pool, new_prompt)
    corrupt(vllm_pool, *keys, byte=-100)
    counted = server.troubles("retrieve", "corrupt")
    with server.abandoned(prompt):
        wait_for(lambda: server.troubles("retrieve", "corrupt") > counted)
    answer = server.complete(prompt)
    assert answer.tokens == plain.tokens(prompt)
    all_free(server)


def test_several_prompts_arrive_within_one_step(
    server: PdCacheServer, plain: Reference, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    halves = [half_stored(server, vllm_pool, new_prompt) for _ in range(3)]
    corrupt(vllm_pool, *sorted(halves[1][1])[:1])
    prompts = [prompt for prompt, _ in halves]
    answers = server.complete_all(prompts)
    assert [one.tokens for one in answers] == [plain.tokens(one) for one in prompts]
    all_free(server)


def test_a_memory_node_that_stops_or_is_killed_while_layers_arrive(
    server: PdCacheServer, plain: Reference, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    prompt, _ = half_stored(server, vllm_pool, new_prompt)
    failed = server.metric("vllm:pd_cache_troubles_total", op="retrieve")
    with stopped(vllm_pool, "store-0"):
        answer = server.complete(prompt)
    assert answer.tokens == plain.tokens(prompt)
    wait_for(lambda: server.metric("vllm:pd_cache_troubles_total", op="retrieve") > failed)
    all_free(server)

    prompt, _ = half_stored(server, vllm_pool, new_prompt)
    with ThreadPoolExecutor(1) as thread:
        vllm_pool.nodes["store-0"].send(signal.SIGSTOP)
        asked = thread.submit(server.complete, prompt)
        threading.Timer(1.0, lambda: vllm_pool.kill("store-0")).start()
        assert asked.result().tokens == plain.tokens(prompt)
    try:
        all_free(server)
    finally:
        wait_for(lambda: "store-0" not in vllm_pool.nodes)
        vllm_pool.start("store-0")
    assert server.complete(other := new_prompt(100)).tokens == plain.tokens(other)


def test_a_reset_while_layers_arrive(
    server: PdCacheServer, plain: Reference, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    prompt, _ = half_stored(server, vllm_pool, new_prompt)
    server.reset_external()
    answer = server.complete(prompt)
    assert (answer.cached, answer.tokens) == (0, plain.tokens(prompt))
    all_free(server)
