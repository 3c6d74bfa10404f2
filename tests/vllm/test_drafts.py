"""Draft models with KV of their own. Their layers are a layer group, and a load gives them the KV that they
would have computed."""

from typing import NamedTuple

import pytest

from bench.lib.small_models import write_model
from tests.vllm.draft_models import add_mtp, write_eagle
from tests.vllm.servers import CHUNK, SHARDS, Answer, cluster_file, running
from tests.vllm.test_groups import by_group, same

KINDS = ("eagle", "mtp")
each = pytest.mark.parametrize("kind", KINDS)
GENERATED = 24


@pytest.fixture(scope="module")
def drafting(vllm_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    llama, ernie = (
        write_model(folder / "llama", layers=2),
        write_model(folder / "ernie", kind="ernie", layers=1),
    )
    head = write_eagle(folder / "head", llama)
    eagle = f'{{"method": "eagle", "model": "{head}", "num_speculative_tokens": 3}}'
    mtp = '{"method": "mtp", "num_speculative_tokens": 2}'
    files = []
    for model, drafts, scheduling in ((llama, eagle, True), (add_mtp(ernie), mtp, False)):
        args = {"speculative-config": drafts, "async-scheduling": scheduling, "num-gpu-blocks-override": 256}
        files.append(cluster_file(folder, vllm_pool, model, {"prefill-0": {}}, args=args))
    with running(*files) as servers:
        yield dict(zip(KINDS, servers, strict=True))


class Drafted(NamedTuple):
    answer: Answer
    accepted: float
    """How many drafts were right."""


def drafted(server, prompt, **options):
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    answer = server.store(prompt, GENERATED, logprobs=1, **options)
    return Drafted(answer, server.metric("vllm:spec_decode_num_accepted_tokens_total") - before)


@each
def test_a_load_leaves_a_chunk_and_its_drafts_are_accepted_as_often_as_without_it(
    drafting, kind, new_prompt, vllm_pool
):
    server, total = drafting[kind], 0.0
    # a prompt that ends where a chunk ends; one in which vLLM's steps end within the prompt
    for length in (128, 600):
        prompt, chunks = new_prompt(length), length // CHUNK
        expected = drafted(server, prompt, cache_salt=f"a tenant for whom nothing is stored, {length}")
        before = vllm_pool.keys()
        stored = drafted(server, prompt)
        assert sorted(len(keys) for keys in by_group(vllm_pool, before)) == [
            SHARDS * count for count in (chunks - 1, chunks)
        ], "the draft model stores all chunks but the last, whose KV depends on the token behind it"
        server.forget_prefixes()
        loaded = drafted(server, prompt)
        assert (expected.answer.cached, stored.answer.cached, loaded.answer.cached) == (
            0,
            0,
            (chunks - 1) * CHUNK,
        )
        assert same(stored.answer, expected.answer), length
        assert same(loaded.answer, expected.answer), length
        assert loaded.accepted == stored.accepted == expected.accepted, length
        total += expected.accepted
    assert total >= GENERATED / 2, "drafts that are never right would not show that the KV is"
