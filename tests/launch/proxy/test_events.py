"""The index of blocks: after any events it says what a node has, within its budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.proxy.events import BlockBudget, KnownCache
from launch.proxy.prefixes import NamedPrompt, PromptNamer, RoutedPrompt
from launch.proxy.routing import NodePool, Target
from pd_cache.chunks import describe_hashes
from pd_cache.events import ClearedEvent, EventBatch, Forget, KvEvent, RemovedEvent, StoredEvent
from tests.support.proxy import NAMESPACE

SPACE = "f" * 16


def prompt(blocks: list[int], chunks: list[int] = [], pool_tokens: int = 0) -> NamedPrompt:  # noqa: B006
    return NamedPrompt(SPACE, 16 * len(blocks) + 5, blocks, 16, chunks, 64, pool_tokens)


def cache(*events: KvEvent, budget: BlockBudget | None = None) -> KnownCache:
    made = KnownCache(budget or BlockBudget(1000))
    made.fingerprint = SPACE
    made.apply([EventBatch(1.0, list(events))])
    return made


events = st.one_of(
    st.builds(lambda hashes, medium: StoredEvent(hashes, medium=medium), st.lists(st.integers(0, 15)), st.sampled_from([None, "GPU", "CPU", "STORAGE"])),
    st.builds(lambda hashes, medium: RemovedEvent(hashes, medium), st.lists(st.integers(0, 15)), st.sampled_from([None, "GPU", "CPU", "STORAGE"])),
    st.just(ClearedEvent()),
    st.just(Forget.ALL),
)  # fmt: skip


@given(st.lists(events, max_size=30), st.lists(st.integers(0, 15), unique=True))
def test_after_any_events_a_cache_knows_what_they_say(happened: list[KvEvent | Forget], blocks: list[int]) -> None:
    budget = BlockBudget(1000)
    known, model = KnownCache(budget), {"GPU": set(), "CPU": set()}  # type: ignore[var-annotated]
    for event in happened:
        known.apply([event if isinstance(event, Forget) else EventBatch(1.0, [event])])
        if isinstance(event, StoredEvent | RemovedEvent):
            medium = event.medium or "GPU"
            if medium in model:
                change = model[medium].update if isinstance(event, StoredEvent) else model[medium].difference_update
                change(event.block_hashes)
        else:
            model = {"GPU": set(), "CPU": set()}
    there = 0
    while there < len(blocks) and any(blocks[there] in one for one in model.values()):
        there += 1
    assert known.tokens(prompt(blocks)) == 16 * there
    assert budget.used == len(known) == sum(map(len, model.values()))


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=12), st.integers(0, 20))
def test_no_history_takes_more_than_the_budget(stored: list[list[int]], most: int) -> None:
    budget = BlockBudget(most)
    caches = [KnownCache(budget) for _ in range(3)]
    for number, hashes in enumerate(stored):
        caches[number % 3].apply([EventBatch(1.0, [StoredEvent(hashes)])])
        assert budget.used <= most
    for one in caches:
        one.forget()
    assert budget.used == 0, "what leaves gives everything back"


def test_hashes_of_either_form_and_prompts_meet() -> None:
    tokens, space = list(range(100)), NAMESPACE
    blocks = {"hash_mode": "blocks", "hash_seed": describe_hashes("sha256", "vllm-none-hash", "")}
    import msgspec

    naming = PromptNamer(msgspec.structs.replace(space, **blocks)).name(tokens, None)
    assert len(naming.prompt.blocks) == 6
    from pd_cache.chunks import BlockHasher

    whole = BlockHasher(16, blocks["hash_seed"]).hashes(tokens)
    for hashes in (whole, [int.from_bytes(one, "big") & (1 << 64) - 1 for one in whole]):
        known = cache(StoredEvent(list(hashes[:4]), medium="GPU"))
        assert known.tokens(naming.prompt) == 64


def test_after_a_loss_nothing_is_known_until_events_come_again() -> None:
    known = cache(StoredEvent([1, 2]))
    known.apply([Forget.ALL])
    assert not known.knows(prompt([1, 2])), "so the proxy guesses, as for a node without events"
    known.apply([Forget.ALL, EventBatch(2.0, [StoredEvent([1])])])
    assert known.knows(prompt([1, 2]))


def test_what_is_under_way_counts_until_it_is_answered() -> None:
    known = cache(StoredEvent([1, 2]))
    begun = known.begin(prompt([1, 2, 3, 4]))
    again = known.begin(prompt([1, 2, 3]))
    assert known.tokens(prompt([1, 2, 3, 4, 5])) == 64
    known.end(begun)
    assert known.tokens(prompt([1, 2, 3, 4, 5])) == 48
    known.end(again)
    assert known.tokens(prompt([1, 2, 3, 4, 5])) == 32
    assert not known._under_way


def test_layers_with_a_window_say_nothing_of_prefixes() -> None:
    known = cache(
        StoredEvent([1, 2, 3], group_idx=0, kv_cache_spec_kind="full_attention"),
        StoredEvent([1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="sliding_window"),
        RemovedEvent([1], group_idx=1),
    )
    assert known.tokens(prompt([1, 2, 3, 4])) == 48


# --- cost ------------------------------------------------------------------------------------------------------------


def routed(blocks: list[int], **more: int) -> RoutedPrompt:
    return RoutedPrompt(16 * len(blocks) + 5, [], 64, prompt(blocks, **more))


def pool(**caches: KnownCache) -> NodePool:
    made = NodePool("prefill", "prefix_aware")
    made.update(Target(url) for url in ("a", "b"))
    made.know(caches)
    return made


def test_the_node_whose_events_say_that_it_has_the_prompt_is_taken() -> None:
    nodes = pool(a=cache(StoredEvent([1])), b=cache(StoredEvent([1, 2, 3])))
    assert nodes.pick(0.0, routed([1, 2, 3, 4])) == "b"


def test_a_node_that_has_evicted_the_prompt_is_not_taken_for_it() -> None:
    nodes = pool(a=cache(), b=cache())
    first, second = str(nodes.pick(0.0, routed([9]))), str(nodes.pick(0.0, routed([9])))
    with nodes.working(second, routed([1, 2, 3])):
        pass
    assert nodes.pick(0.0, routed([1, 2, 3])) == first, (
        "the events do not say that the second kept it, and the first is next"
    )


def test_what_the_pool_holds_makes_nodes_equal_as_far_as_loading_is_cheap() -> None:
    nodes = pool(a=cache(StoredEvent([1, 2, 3])), b=cache())
    for cost, taken in ((0.0, {"a", "b"}), (0.5, {"a"})):
        nodes.load_cost = cost
        assert {nodes.pick(0.0, routed([1, 2, 3, 4], pool_tokens=48)) for _ in range(4)} == taken


def test_a_queue_that_is_longer_than_the_difference_sends_the_prompt_elsewhere() -> None:
    nodes = pool(a=cache(StoredEvent([1, 2, 3])), b=cache())
    with nodes.working("a", routed(list(range(100, 110)))):
        assert nodes.pick(0.0, routed([1, 2, 3, 4])) == "b"


@pytest.mark.parametrize("known", [True, False])
def test_a_node_without_events_is_guessed_beside_one_with_events(known: bool) -> None:
    blocks = [b"x", b"y"]
    text = RoutedPrompt(128, blocks, 64, prompt([1, 2, 3, 4, 5, 6, 7]) if known else None)
    nodes = pool(a=cache(StoredEvent([1, 2])))
    with nodes.working("b", text):
        pass
    assert nodes.pick(0.0, text) == "b", "it was sent there, and `a` has less of it"
