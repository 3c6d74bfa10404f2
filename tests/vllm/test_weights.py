"""Weights that change while vLLM runs: what the old ones computed reaches no node again."""

import pytest

from bench.lib.small_models import write_model
from tests.vllm.servers import CHUNK


def weights(server):
    """The state of its engine's weights, as its `/health` says it."""
    (state,) = server.ask("/health")["weights"]
    return dict(state)


def name(label, *servers):
    """Names their weights, as `pd-cache reset` does."""
    for server in servers:
        (state,) = server.ask("/weights", {"label": label, "ids": [weights(server)["id"]]})
        assert state == weights(server)
        assert state["label"] == label


@pytest.fixture
def reloads(pair, model):
    """Replaces the weights of both nodes, which hear of it one after the other. In the end all have those
    with which nodes start."""

    def reload(folder):
        for server in pair:
            server.reload_weights(folder)
            server.settle()
            server.reset_external()

    yield reload
    reload(model)
    name("", *pair)


def computed(server, weights, prompts):
    """What the plain vLLM answers with these weights, which it keeps."""
    server.reload_weights(weights)
    server.forget_prefixes()
    return [server.complete(prompt).tokens for prompt in prompts]


def test_after_a_change_no_node_loads_what_old_weights_computed(
    pair, plain, model, reloads, new_prompt, tmp_path
):
    *prompts, again = [new_prompt(6 * CHUNK + 10) for _ in range(4)]
    new_weights = write_model(tmp_path / "llama", seed=1)
    *new, of_again = computed(plain.server(), new_weights, [*prompts, again])
    old = computed(plain.server(), model, prompts)
    for prompt, before, after in zip(prompts, old, new, strict=True):
        assert pair.a.store(prompt).tokens == before != after
        assert pair.b.complete(prompt).cached == 6 * CHUNK
    reloads(new_weights)
    for server in pair:
        assert weights(server)["label"] is None
        unnamed = server.troubles("lookup", "weights_unnamed")
        assert server.complete(prompts[0]).outcome == (0, new[0])
        assert server.troubles("lookup", "weights_unnamed") > unnamed
    name("w1", *pair)
    for prompt, after in zip(prompts, new, strict=True):
        assert pair.b.store(prompt).outcome == (0, after)
    assert pair.a.store(again).tokens == of_again
    assert pair.b.store(again).outcome == (6 * CHUNK, of_again), "the new version is shared"
    for path in ("/pause", "/resume"):  # as a trainer does that brings new weights
        pair.b.ask(path, {})
    assert pair.b.complete(again).outcome == (0, of_again)
    name("w1", pair.b)
    assert pair.b.complete(again).outcome == (6 * CHUNK, of_again)
