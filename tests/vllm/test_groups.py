"""Models with several layer groups: windows, or states, beside full attention. A load has a part for each
layer group. Some tests run several ranks, each of which has some of the heads, or some of the layers."""

import itertools
from collections import defaultdict
from typing import NamedTuple

import pytest

from bench.lib.small_models import write_model
from tests.support.waiting import wait_for
from tests.vllm.servers import (
    CHUNK,
    LENGTH,
    SHARDS,
    TRANSFER,
    cluster_file,
    running,
)


class Kind(NamedTuple):
    """How a model is written and served."""

    layers: int
    blocks: int
    """Blocks of vLLM's KV cache: enough for one long request, and not for several."""
    args: dict
    tails: tuple
    """How many chunks a load needs of each layer group other than full attention."""
    mode: str
    """Where the cache is: in the engine's worker, or in a cache server."""
    divisible: bool = True
    """Whether all tokens but one can be loaded, and the layers be cut into shards."""
    chunk: int = CHUNK
    """The tokens of a chunk."""
    recompute: str = "token"
    """What a load of a whole prompt leaves to compute. A window cannot be restored inside of a chunk, so
    `block` then leaves a chunk."""


STATES = {"dtype": "bfloat16", "mamba-cache-mode": "align", "max-num-seqs": 16}
"""`max-num-seqs`: vLLM needs a block for the state of each request."""
KINDS = {
    "gemma3": Kind(6, 100, {}, (4, 4), "in-process"),
    "gptoss": Kind(4, 80, {}, (2,), "server", recompute="block"),
    # On CPUs with AVX-512 BF16, vLLM 0.32 keeps gated delta nets' states in float32 and takes blocks of 96
    # tokens for them. Its kernel works on 64 tokens at a time, and rounds differently where a prompt is cut
    # inside them.
    "qwen3next": Kind(8, 60, {**STATES, "block-size": 128}, (1, 1, 1), "server", divisible=False, chunk=128),
}
each = pytest.mark.parametrize("kind", KINDS)
_ROUNDED = 2e-3
"""How far two logprobs of the same token may be apart."""


def chunking(kind):
    """Returns what a file says of chunks: those of states must be as large as vLLM's blocks, which `auto`
    sees to."""
    return {"chunk_size": CHUNK, "shards": SHARDS} if KINDS[kind].divisible else {}


@pytest.fixture(scope="module")
def nodes(vllm_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    files = []
    for kind, one in KINDS.items():
        served = write_model(folder / kind, kind=kind, layers=one.layers)
        args = {"max-model-len": 2048, "num-gpu-blocks-override": one.blocks, **one.args}
        cache = chunking(kind)
        options = {"args": args, "cache": cache, "connector": {"recompute": one.recompute}}
        files.append(cluster_file(folder, vllm_pool, served, {"prefill-0": {}}, mode=one.mode, **options))
    with running(*files) as servers:
        yield dict(zip(KINDS, servers, strict=True))


_tenants = itertools.count()


def computed(server, prompt, max_tokens=6):
    """Returns the answer to a prompt that the server computes from its beginning: nothing is stored under the
    salt."""
    salt = f"a tenant for whom nothing is stored, {next(_tenants)}"
    answer = server.store(prompt, max_tokens, logprobs=2, cache_salt=salt)
    assert answer.cached == 0
    return answer


def afresh(server, prompt):
    """Returns the answer to a prompt when the server's own prefix cache is empty."""
    server.forget_prefixes()
    return server.store(prompt, logprobs=2)


def same(answer, expected):
    """Whether tokens and logprobs are the same, up to a tie: states are in bfloat16, and a prompt that is cut
    elsewhere is rounded elsewhere.

    At a tie, both answers have another token that is as likely as the one they took. What follows it is not
    compared.
    """
    for index, (token, other) in enumerate(zip(answer.tokens, expected.tokens, strict=True)):
        if answer.logprobs[index] != pytest.approx(expected.logprobs[index], abs=_ROUNDED):
            return False
        if token != other:
            return all(one.logprobs[index] - one.seconds_best[index] < _ROUNDED for one in (answer, expected))
    return True


def by_group(pool, before):
    """Returns the keys that are in the pool now and not in `before`: a list for each namespace, in no
    order."""
    groups = defaultdict(list)
    for key in sorted(pool.keys() - before):
        groups[key.split("/")[1]].append(key)
    return list(groups.values())


def stored(server, pool, prompt):
    """Returns the keys under which the server stores a prompt: a list for each layer group."""
    before = pool.keys()
    server.store(prompt)
    return by_group(pool, before)


def wholes(kind, length):
    """Returns how many tokens of a stored prompt a load restores: its whole chunks, but at most all tokens
    but one. With states, or if vLLM's last block is left to compute, no part of a chunk."""
    chunk = KINDS[kind].chunk
    if KINDS[kind].divisible and KINDS[kind].recompute == "token":
        return min(length // chunk * chunk, length - 1)
    return (length - 1) // chunk * chunk


@each
def test_what_a_request_for_one_token_has_loaded_the_next_one_finds_at_hand(nodes, kind, new_prompt):
    """So a proxy prefetches (docs/hints.md)."""
    server, prompt = nodes[kind], new_prompt(LENGTH)
    server.store(prompt)
    server.forget_prefixes()
    server.store(prompt, 1)
    loaded = server.loaded
    answer = server.store([*prompt, *new_prompt(100)])
    assert answer.cached >= wholes(kind, LENGTH) - KINDS[kind].chunk
    assert server.loaded == loaded


@each
def test_what_was_stored_is_loaded_whatever_the_window_covers(nodes, kind, new_prompt, vllm_pool):
    server, chunk = nodes[kind], KINDS[kind].chunk
    # shorter than a chunk, at a chunk's end and behind it, shorter and longer than each window, and far
    # longer
    for length in (63, 64, 65, 127, 128, 129, 192, 200, 255, 256, 257, 320, 330, 449, LENGTH):
        prompt = new_prompt(length)
        before = vllm_pool.keys()
        expected = server.store(prompt, logprobs=2)
        assert expected.cached == 0
        chunks = (length if KINDS[kind].divisible else length - 1) // chunk
        parts = SHARDS if KINDS[kind].divisible else 1
        counts = sorted(len(keys) for keys in by_group(vllm_pool, before))
        moved = server.loaded
        answer = afresh(server, prompt)
        assert same(answer, expected), length
        assert answer.cached == wholes(kind, length), length
        loaded = server.loaded - moved
        counted = [
            server.metric(f"vllm:pd_cache_{name}_total", op="retrieve") for name in ("bytes", "group_bytes")
        ]
        assert counted[0] == counted[1], "each byte is that of a group"
        whole = -(-wholes(kind, length) // chunk)
        needed = whole + sum(min(tail, whole) for tail in KINDS[kind].tails)
        assert loaded == needed * chunk, "of windows and states, only what the end needs"
        if chunks:
            # a window's tail is also that of a prompt that ends one token earlier
            most = [length // chunk, *(min(chunks, tail + 1) for tail in KINDS[kind].tails)]
            assert len(counts) == len(most)
            assert all(count <= parts * limit for count, limit in zip(counts, sorted(most), strict=True)), (
                length
            )


@each
def test_a_longer_prompt_continues_where_the_stored_one_ended(nodes, kind, new_prompt):
    server = nodes[kind]
    prompt = new_prompt(LENGTH)
    server.store(prompt)
    longer = prompt + new_prompt(200)
    answer = afresh(server, longer)
    assert same(answer, computed(server, longer))
    chunk = KINDS[kind].chunk
    assert answer.cached == (LENGTH if KINDS[kind].divisible else LENGTH - 1) // chunk * chunk


@each
def test_the_third_of_prompts_that_part_in_the_middle_loads_what_they_share(nodes, kind, new_prompt):
    server, shared = nodes[kind], new_prompt(500)
    parting = 500 // KINDS[kind].chunk * KINDS[kind].chunk
    for number, cached in enumerate((0, 0, parting)):
        prompt = shared + new_prompt(150 + number)
        answer = afresh(server, prompt)
        assert answer.cached == cached, (
            "the second sees where they part, and stores what the third needs there"
        )
        assert same(answer, computed(server, prompt))


@each
def test_a_prompt_of_which_one_group_was_evicted_is_computed_and_stored_again(
    nodes, kind, new_prompt, vllm_pool
):
    server, prompt = nodes[kind], new_prompt(LENGTH)
    expected = computed(server, prompt)
    groups = stored(server, vllm_pool, prompt)
    assert len(groups) == 1 + len(KINDS[kind].tails)
    for keys in groups:
        vllm_pool.remove(*keys)
        missing = afresh(server, prompt)
        assert same(missing, expected)
        assert missing.cached == 0
        again = afresh(server, prompt)
        assert same(again, expected)
        assert again.cached == wholes(kind, LENGTH)


@each
def test_a_damaged_object_of_any_group_is_never_used(nodes, kind, new_prompt, vllm_pool):
    server, prompt = nodes[kind], new_prompt(LENGTH)
    expected = computed(server, prompt)
    for keys in stored(server, vllm_pool, prompt):
        vllm_pool.damage(*keys)
        counted = server.troubles("retrieve", "corrupt")
        assert same(afresh(server, prompt), expected)
        assert server.troubles("retrieve", "corrupt") == counted + 1, "the first of them ends the load"
        with vllm_pool.bare_client() as client:
            for key in keys:
                client.remove(key, True)
        assert same(afresh(server, prompt), expected)
        assert afresh(server, prompt).cached == wholes(kind, LENGTH)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].divisible])
def test_preempted_requests_have_the_tokens_of_those_that_were_alone(nodes, kind, new_prompt):
    """There are more requests than fit, so that loads wait for blocks, too. Models with states are left out:
    they need bfloat16, in which a plain vLLM also gives other tokens if requests are computed together."""
    server, answered = nodes[kind], 100 if kind == "gemma3" else 30
    prompts = [new_prompt(900 + 30 * number) for number in range(6)]
    expected = [computed(server, prompt, answered).tokens for prompt in prompts]
    before = server.metric("vllm:num_preemptions_total")
    for _ in range(2):  # the prompts are computed, and then loaded
        server.forget_prefixes()
        answers = server.complete_all(prompts, answered)
        server.settle()
        assert [answer.tokens for answer in answers] == expected
    if kind == "gemma3":  # vLLM may also let the others wait instead of preempting them
        assert server.metric("vllm:num_preemptions_total") > before, "there is not room for all of them"


PATIENT = {
    "transfer": {**TRANSFER, "timeouts": {"exist_ms": 30_000, "get_ms": 30_000, "put_ms": 30_000}},
    "connector": {"load_timeout_ms": 300_000},
}


@pytest.fixture
def two_ranks(vllm_pool, tmp_path):
    """Returns a function that runs a node of two ranks.

    The ranks wait for each other in a loop of `sched_yield`. If they take up all cores, Linux 6.18 runs
    nothing else for five to eight seconds, kernel threads included. A cache server then counts as lost, and
    the prompt is computed.
    """

    def run(kind, mode, **args):
        served = write_model(tmp_path / kind, kind=kind, layers=KINDS[kind].layers)
        args = {"max-model-len": 2048, "num-gpu-blocks-override": 200, **KINDS[kind].args, **args}
        cache = chunking(kind)
        node = {"prefill-0": {"env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}}
        file = cluster_file(tmp_path, vllm_pool, served, node, mode=mode, args=args, cache=cache, **PATIENT)
        return running(file)

    return run


def loads_whole(server, kind, prompt, expected):
    """Asks until all of the prompt is loaded. Each answer on the way must be the expected one, too."""

    def loaded():
        answer = afresh(server, prompt)
        assert same(answer, expected), "whether it was loaded or not"
        return answer.cached == wholes(kind, len(prompt))

    wait_for(loaded)


def test_nodes_of_one_rank_and_of_two_share_windows(nodes, two_ranks, new_prompt, vllm_pool):
    of_one, of_two, one = new_prompt(LENGTH), new_prompt(LENGTH), nodes["gptoss"]
    expected = [computed(one, prompt) for prompt in (of_one, of_two)]
    stored(one, vllm_pool, of_one)
    with two_ranks("gptoss", "in-process", **{"tensor-parallel-size": 2}) as (two,):
        loads_whole(two, "gptoss", of_one, expected[0])
        before = vllm_pool.keys()
        loads_whole(two, "gptoss", of_two, expected[1])  # at the second try, or later
        assert len(by_group(vllm_pool, before)) == 2, "full attention and windows"
    loads_whole(one, "gptoss", of_two, expected[1])


def test_pipeline_stages_store_their_layers_and_a_chunk_is_found_if_all_are_there(
    nodes, two_ranks, new_prompt, vllm_pool
):
    prompt, one = new_prompt(LENGTH), nodes["gptoss"]
    expected = computed(one, prompt)
    stored(one, vllm_pool, prompt)
    # vLLM 0.32 on CPUs runs a second stage only if the model is compiled (docs/vllm.md)
    compiled = {"enforce-eager": False, "compilation-config": '{"mode": 2, "backend": "eager"}'}
    before = vllm_pool.keys()
    with two_ranks("gptoss", "server", **{"pipeline-parallel-size": 2, **compiled}) as (two,):
        assert afresh(two, prompt).cached == 0, "a node without stages has other objects"
        loads_whole(two, "gptoss", prompt, expected)
        groups = by_group(vllm_pool, before)
        assert len(groups) == 4, "full attention and windows, of two stages"
        vllm_pool.remove(*groups[-1])
        missing = afresh(two, prompt)
        assert (same(missing, expected), missing.cached) == (True, 0)
        loads_whole(two, "gptoss", prompt, expected)
