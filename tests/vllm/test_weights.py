"""Weights that change while vLLM runs: what the old ones computed reaches no node again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lib.model import write_model
from launch.versions import known_versions
from pd_cache.versions import FIRST
from tests.support.pool import Pool
from tests.support.waiting import wait_for
from tests.vllm.fixtures import Pair
from tests.vllm.servers import CHUNK, Reference, Server, begun, cluster_file, running

NewPrompt = Callable[[int], list[int]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("later") / "llama", seed=1)


@contextmanager
def node(file: Path) -> Iterator[Server]:
    with running(file, "prefill-0") as (server,):
        yield server


@pytest.fixture(scope="session")
def fresh(new_weights: Path, vllm_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What a node answers that was started with the new weights. It gets ready beside the others."""
    file = cluster_file(tmp_path_factory.mktemp("fresh"), vllm_pool, new_weights, {"prefill-0": {}})
    with begun(node(file)) as server:
        yield Reference(server)


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


def test_after_a_reset_no_node_loads_what_old_weights_computed(
    pair: Pair,
    plain: Reference,
    fresh: Reference,
    new_weights: Path,
    reloads: Callable[[Path], None],
    new_prompt: NewPrompt,
) -> None:
    prompts = [new_prompt(6 * CHUNK + 10) for _ in range(3)]
    for prompt in prompts:
        assert stored(pair.a, prompt) == plain.tokens(prompt)
        assert pair.b.complete(prompt).cached == 6 * CHUNK
        other = fresh.server().complete(prompt)
        assert (other.cached, other.tokens) == (0, fresh.tokens(prompt)), "a model of the same name shares nothing"
        assert other.tokens != plain.tokens(prompt)
    reloads(new_weights)
    for prompt in prompts:
        answer = pair.b.complete(prompt)
        assert (answer.cached, answer.tokens) == (0, fresh.tokens(prompt))
        wait_for(lambda: not pair.b.blocks_in_use)
    again = new_prompt(6 * CHUNK + 10)
    assert stored(pair.a, again) == fresh.tokens(again)
    answer = pair.b.complete(again)
    assert (answer.cached, answer.tokens) == (6 * CHUNK, fresh.tokens(again)), "the new version is shared"
    wait_for(lambda: not pair.b.blocks_in_use)
    pair.b.pause_and_resume()
    answer = pair.b.complete(again)
    assert (answer.cached, answer.tokens) == (0, fresh.tokens(again)), "a trainer may have brought others"
