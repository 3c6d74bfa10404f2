"""Weights that change while vLLM runs: what the old ones computed reaches no node again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch.versions import known_versions

from bench.lib.model import write_model
from pd_cache.versions import FIRST
from tests.support.pool import Pool
from tests.vllm.fixtures import Pair
from tests.vllm.servers import CHUNK, Server


@pytest.fixture
def reloads(pair: Pair, model: Path, vllm_pool: Pool) -> Iterator[Callable[[Path], None]]:
    """Replaces the weights of both nodes, which say so one after the other. In the end all have those with which nodes start."""

    def reload(folder: Path) -> None:
        for server in pair:
            server.reload_weights(folder)
            server.settle()
        pair.a.reset_external()
        pair.b.reset_external()

    yield reload
    for server in pair:
        server.reload_weights(model)
        server.settle()
    for weights in known_versions([vllm_pool.versions]):
        vllm_pool.reset(weights, FIRST)


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
        assert pair.a.store(prompt).tokens == before != after
        assert pair.b.complete(prompt).cached == 6 * CHUNK
    reloads(new_weights)
    for prompt, after in zip(prompts, new, strict=True):
        assert pair.b.store(prompt).outcome == (0, after)
    assert pair.a.store(again).tokens == of_again
    assert pair.b.store(again).outcome == (6 * CHUNK, of_again), "the new version is shared"
    for path in ("/pause", "/resume"):  # as a trainer does that brings new weights
        pair.b.ask(path, {})
    assert pair.b.complete(again).outcome == (0, of_again)
