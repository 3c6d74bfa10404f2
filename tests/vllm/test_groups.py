"""Models whose layers do not all keep every token: windows, and states, beside full attention. A group of layers is a part of each load."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from bench.lib.model import ModelKind, write_model
from tests.support.pool import Pool
from tests.support.waiting import wait_for
from tests.vllm.servers import CHUNK, SHARDS, Answer, PdCacheServer, cluster_file, running_all
from tests.vllm.test_failures import all_free, corrupt, stopped

NewPrompt = Callable[[int], list[int]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Kind(NamedTuple):
    """A model of 8 layers, or 6, and how it is served. All have chunks of 64 tokens."""

    layers: int
    blocks: int
    """Enough for one long request, and not for several."""
    args: dict[str, Any]
    tails: tuple[int, ...]
    """Of each group besides the one of full attention, how many chunks a load needs."""
    divisible: bool = True
    """Whether all tokens but one can be loaded."""


STATES = {"dtype": "bfloat16", "mamba-cache-mode": "align", "max-num-seqs": 16}
"""vLLM wants a block for the state of each request."""
KINDS: dict[ModelKind, Kind] = {
    "gemma3": Kind(6, 100, {}, (4, 4)),
    "gptoss": Kind(4, 80, {}, (2,)),
    "qwen3next": Kind(8, 60, STATES, (1, 1, 1), divisible=False),
    # vLLM 0.32 on CPUs has no states inside a step, so a step must not reach beyond a block
    "mamba2": Kind(4, 60, {**STATES, "max-num-batched-tokens": CHUNK}, (1, 1, 1), divisible=False),
}
each = pytest.mark.parametrize("kind", KINDS)
LENGTH = 1000


@pytest.fixture(scope="module")
def nodes(vllm_pool: Pool, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PdCacheServer]]:
    folder = tmp_path_factory.mktemp("groups")
    files = []
    for kind, (layers, blocks, args, _, divisible) in KINDS.items():
        # states cannot be cut into the parts of several ranks; their chunks have the size that vLLM's blocks have
        cache = {"chunk_size": CHUNK, "shards": SHARDS} if divisible else {}
        served = write_model(folder / kind, kind=kind, layers=layers)
        args = {"max-model-len": 2048, "num-gpu-blocks-override": blocks, **args}
        files.append(cluster_file(folder, vllm_pool, served, {"prefill-0": {}}, mode=mode, args=args, cache=cache))
    with running_all(*((file, ("prefill-0",)) for file in files)) as servers:
        yield dict(zip(KINDS, servers, strict=True))


_tenants = itertools.count()


def computed(server: PdCacheServer, prompt: list[int], max_tokens: int = 6) -> Answer:
    """What it computes of a prompt of which it has nothing."""
    salt = f"a tenant for whom nothing is stored, {next(_tenants)}"
    answer = server.complete(prompt, max_tokens, logprobs=1, cache_salt=salt)
    assert answer.cached == 0
    all_free(server)
    return answer


def afresh(server: PdCacheServer, prompt: list[int]) -> Answer:
    """What it answers when its own prefix cache is empty."""
    server.forget_prefixes()
    answer = server.complete(prompt, logprobs=1)
    all_free(server)
    return answer


def same(answer: Answer, expected: Answer) -> bool:
    return answer.tokens == expected.tokens and answer.logprobs == pytest.approx(expected.logprobs, abs=2e-3)


def by_group(pool: Pool, before: set[str]) -> list[list[str]]:
    """The keys that came since, one list for each namespace, in no order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in sorted(pool.keys() - before):
        groups[key.split("/")[1]].append(key)
    return list(groups.values())


def stored(server: PdCacheServer, pool: Pool, prompt: list[int]) -> list[list[str]]:
    """The keys under which it stores a prompt, a list for each group."""
    before = pool.keys()
    server.complete(prompt)
    all_free(server)
    return by_group(pool, before)


def wholes(kind: ModelKind, length: int) -> int:
    """How many tokens of a prompt are loaded: all but one, or as many as its last state holds."""
    if KINDS[kind].divisible:
        return min(length // CHUNK * CHUNK, length - 1)
    return (length - 1) // CHUNK * CHUNK


@each
def test_what_was_stored_is_loaded_whatever_the_window_covers(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    server = nodes[kind]
    # below a chunk, at its end and beyond, below and above both windows, and far beyond them
    for length in (63, 64, 65, 127, 128, 129, 192, 200, 255, 256, 257, 320, 330, 449, LENGTH):
        prompt = new_prompt(length)
        before = vllm_pool.keys()
        expected = server.complete(prompt, logprobs=1)
        all_free(server)
        assert expected.cached == 0
        chunks = (length if KINDS[kind].divisible else length - 1) // CHUNK
        parts = SHARDS if KINDS[kind].divisible else 1
        counts = sorted(len(keys) for keys in by_group(vllm_pool, before))
        moved = server.metric("vllm:pd_cache_tokens_total", op="retrieve", outcome="loaded")
        answer = afresh(server, prompt)
        assert same(answer, expected), length
        assert answer.cached == wholes(kind, length), length
        loaded = server.metric("vllm:pd_cache_tokens_total", op="retrieve", outcome="loaded") - moved
        needed = chunks + sum(min(tail, chunks) for tail in KINDS[kind].tails)
        assert loaded == needed * CHUNK, "of windows and states, only what the end needs"
        if chunks:
            # a window's tail is also that of a prompt that ends one token earlier
            most = [length // CHUNK, *(min(chunks, tail + 1) for tail in KINDS[kind].tails)]
            assert len(counts) == len(most)
            assert all(count <= parts * limit for count, limit in zip(counts, sorted(most), strict=True)), length


@each
def test_a_longer_prompt_continues_where_the_stored_one_ended(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt
) -> None:
    server = nodes[kind]
    prompt = new_prompt(LENGTH)
    server.complete(prompt)
    all_free(server)
    longer = prompt + new_prompt(200)
    answer = afresh(server, longer)
    assert same(answer, computed(server, longer))
    assert answer.cached == (LENGTH // CHUNK if KINDS[kind].divisible else (LENGTH - 1) // CHUNK) * CHUNK


@each
def test_the_third_of_prompts_that_part_in_the_middle_loads_what_they_share(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt
) -> None:
    server, shared = nodes[kind], new_prompt(500)
    parting = 500 // CHUNK * CHUNK
    for number, cached in enumerate((0, 0, parting)):
        prompt = shared + new_prompt(150 + number)
        answer = afresh(server, prompt)
        assert answer.cached == cached, "the second sees where they part, and stores what the third needs there"
        assert same(answer, computed(server, prompt))


@each
def test_a_prompt_of_which_one_group_was_evicted_is_computed_and_stored_again(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    server, prompt = nodes[kind], new_prompt(LENGTH)
    expected = computed(server, prompt)
    groups = stored(server, vllm_pool, prompt)
    assert len(groups) == 1 + len(KINDS[kind].tails)
    for keys in groups:
        with vllm_pool.bare_client() as client:
            assert all(client.remove(key, True) == 0 for key in keys)
        missing = afresh(server, prompt)
        assert same(missing, expected)
        assert missing.cached == 0
        again = afresh(server, prompt)
        assert same(again, expected)
        assert again.cached == wholes(kind, LENGTH)


@each
def test_a_damaged_object_of_any_group_is_never_used(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    server, prompt = nodes[kind], new_prompt(LENGTH)
    expected = computed(server, prompt)
    for keys in stored(server, vllm_pool, prompt):
        corrupt(vllm_pool, *keys)
        counted = server.troubles("retrieve", "corrupt")
        assert same(afresh(server, prompt), expected)
        assert server.troubles("retrieve", "corrupt") == counted + 1, "the first of them ends the load"
        with vllm_pool.bare_client() as client:
            for key in keys:
                client.remove(key, True)
        assert same(afresh(server, prompt), expected)
        assert afresh(server, prompt).cached == wholes(kind, LENGTH)


@each
def test_a_load_that_outlives_its_deadline_is_computed_and_one_whose_client_goes_away_is_given_up(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt, vllm_pool: Pool
) -> None:
    server, prompt = nodes[kind], new_prompt(LENGTH)
    expected = computed(server, prompt)
    server.complete(prompt)
    all_free(server)
    server.forget_prefixes()
    failed = server.metric("vllm:pd_cache_troubles_total", op="retrieve")
    with stopped(vllm_pool, "store-0"):
        with server.abandoned(prompt):
            wait_for(lambda: server.blocks_in_use)
        assert same(server.complete(prompt, logprobs=1), expected)
        wait_for(lambda: server.metric("vllm:pd_cache_troubles_total", op="retrieve") > failed)
    all_free(server)
    answer = afresh(server, prompt)
    assert same(answer, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].divisible])
def test_preempted_requests_have_the_tokens_of_those_that_were_alone(
    nodes: dict[str, PdCacheServer], kind: ModelKind, new_prompt: NewPrompt
) -> None:
    """Not of states: they want bfloat16, in which a plain vLLM, too, gives other tokens to requests that are computed together."""
    server = nodes[kind]
    prompts = [new_prompt(900 + 30 * number) for number in range(4)]
    expected = [computed(server, prompt, 100).tokens for prompt in prompts]
    before = server.metric("vllm:num_preemptions_total")
    for _ in range(2):  # what is computed, and what is loaded
        server.forget_prefixes()
        answers = server.complete_all(prompts, 100)
        all_free(server)
        assert [answer.tokens for answer in answers] == expected
    if kind == "gemma3":  # whether vLLM lets the others wait or preempts them is its own decision
        assert server.metric("vllm:num_preemptions_total") > before, "there is not room for all of them"
