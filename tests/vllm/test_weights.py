"""Weights that change while vLLM runs: what the old ones computed reaches no node again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.lib.model import write_model
from launch.versions import known_versions
from pd_cache.versions import FIRST
from tests.support.pool import Pool
from tests.support.waiting import wait_for
from tests.vllm.fixtures import Pair
from tests.vllm.servers import CHUNK, Server

NewPrompt = Callable[[int], list[int]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def reloads(pair: Pair, model: Path, vllm_pool: Pool) -> Iterator[Callable[[Path], None]]:
    """Replaces the weights of both nodes, which say so one after the other. In the end all have those with which nodes start."""

    def reload(folder: Path) -> None:
        for server in pair:
            server.reload_weights(folder)
        wait_for(lambda: not pair.a.blocks_in_use and not pair.b.blocks_in_use)
        pair.a.reset_external()
        pair.b.reset_external()

    yield reload
    for server in pair:
        server.reload_weights(model)
    wait_for(lambda: not pair.a.blocks_in_use and not pair.b.blocks_in_use)
    for weights in known_versions([vllm_pool.versions]):
        vllm_pool.reset(weights, FIRST)


def stored(server: Server, prompt: list[int]) -> list[int]:
    tokens = server.complete(prompt).tokens
    wait_for(lambda: not server.blocks_in_use)
    return tokens


def computed(server: Server, weights: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What the plain vLLM answers with these weights, which it keeps."""
    server.reload_weights(weights)
    server.forget_prefixes()
    return [server.complete(prompt).tokens for prompt in prompts]


def test_after_a_reset_no_node_loads_what_old_weights_computed(pair, plain, model, reloads, new_prompt, tmp_path):
    *prompts, again = [new_prompt(6 * CHUNK + 10) for _ in range(4)]
    new_weights = write_model(tmp_path / "llama", seed=1)
    *new, of_again = computed(plain.server(), new_weights, [*prompts, again])
    old = computed(plain.server(), model, prompts)
    for prompt, before, after in zip(prompts, old, new, strict=True):
        assert stored(pair.a, prompt) == before != after
        assert pair.b.complete(prompt).cached == 6 * CHUNK
    reloads(new_weights)
    for prompt, after in zip(prompts, new, strict=True):
        answer = pair.b.complete(prompt)
        assert (answer.cached, answer.tokens) == (0, after)
        wait_for(lambda: not pair.b.blocks_in_use)
    assert stored(pair.a, again) == of_again
    answer = pair.b.complete(again)
    assert (answer.cached, answer.tokens) == (6 * CHUNK, of_again), "the new version is shared"
    wait_for(lambda: not pair.b.blocks_in_use)
    for path in ("/pause", "/resume"):  # as a trainer does that brings new weights
        pair.b.open(path, {}).close()
    answer = pair.b.complete(again)
    assert (answer.cached, answer.tokens) == (0, of_again)
