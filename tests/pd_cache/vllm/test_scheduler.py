"""The connector's part in the scheduler: what is loaded and stored, by tables; what becomes of it, by
histories. No vLLM, no pool, no time."""

from typing import NamedTuple

import pytest

from pd_cache.reasons import Loaded, StoreOutcome, TierChunks
from pd_cache.vllm.layers import KeptLayers
from pd_cache.vllm.steps import GroupChunks
from tests.pd_cache.vllm.histories import (
    BLOCK,
    CHUNK,
    COMPUTES,
    DRAFTS,
    FAILED,
    FULL,
    PLAIN,
    PROMPT,
    STATE,
    WAITS,
    WINDOW,
    Request,
    Scene,
    blocks_of,
)

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT
ALL = 99


def run(first, last):
    return list(range(first, last))


def parts_of(scene, request, parts):
    return [GroupChunks(place, scene.names(request)[names], blocks) for place, names, blocks in parts]


# --- loads --------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """A prompt that is loaded, and what of it."""

    layers: tuple
    length: int
    there: int
    """How many of its chunks the pool has."""
    loaded: int
    parts: list
    """Of each layer group, by its place: which of the prompt's chunks move, and in which blocks."""
    at_hand: int = 0
    groups: tuple = ()
    """Its blocks in each of vLLM's groups."""
    recompute: str = "token"


BEYOND_WINDOW = ([0, 0, 0, 0, 34, 35, 36], run(10, 17))
"""Blocks for `PROMPT` in a group with a window, of which vLLM allocates no blocks before it, and in one of
full attention."""
TWO_OF_FULL = (0, slice(2), run(10, 14))
LOADS = {
    "what the pool has": Load((PLAIN,), 27, 2, 16, [TWO_OF_FULL]),
    "all but the last token, from a whole chunk": Load((PLAIN,), 16, ALL, 15, [TWO_OF_FULL]),
    "a block is left": Load((PLAIN,), 24, ALL, 20, [(0, slice(3), [*run(10, 15), -1])], recompute="block"),
    "a token is left anyway": Load((PLAIN,), 25, ALL, 24, [(0, slice(3), run(10, 16))], recompute="block"),
    "the pool has whole chunks only": Load((PLAIN,), 20, ALL, 16, [TWO_OF_FULL], recompute="block"),
    "what is at hand and what is left are of one chunk": Load(
        (PLAIN,), 16, ALL, 4, [(0, slice(1, 2), [12, -1])], at_hand=8, recompute="block"
    ),
    "blocks at hand are left out": Load(
        (PLAIN,), 27, ALL, 12, [(0, slice(1, 3), [-1, 13, 14, 15])], at_hand=12
    ),
    "of a window the end": Load(
        (FULL, WINDOW),
        27,
        ALL,
        24,
        [(0, slice(3), run(10, 16)), (1, slice(2, 3), [-1, 35])],
        groups=([0] * 5 + [35, 36], run(10, 17)),
    ),
    "what is at hand is left out of any group": Load(
        (FULL, WINDOW),
        27,
        ALL,
        4,
        [(0, slice(2, 3), [-1, 15]), (1, slice(2, 3), [-1, 35])],
        20,
        BEYOND_WINDOW,
    ),
    "a window at a chunk's end, also if a block were enough": Load(
        (FULL, WINDOW),
        24,
        ALL,
        16,
        [TWO_OF_FULL, (1, slice(1, 2), [32, 33])],
        groups=([0, 0, 32, 33], run(10, 14)),
        recompute="block",
    ),
    "only windows": Load(
        (KeptLayers(0, BLOCK, "window", 2 * BLOCK),), 27, ALL, 24, [(0, slice(2, 3), [14, 15])]
    ),
    "only states": Load(
        (KeptLayers(0, CHUNK, "state"),), 27, ALL, 24, [(0, slice(2, 3), [12])], groups=(run(10, 14),)
    ),
    "of states the last, and a token is left": Load(
        (PLAIN, KeptLayers(1, CHUNK, "state")),
        16,
        ALL,
        8,
        [(0, slice(1), [10, 11]), (1, slice(1), [20])],
        groups=([10, 11], [20]),
    ),
    "of a draft model by the name of the next chunk, which is left": Load(
        (FULL, DRAFTS),
        24,
        ALL,
        12,
        [(0, slice(2), [-1, 11, 12, 13]), (1, slice(1, 3), [-1, 11, 12, 13])],
        4,
        ([], run(10, 16)),
    ),
    "a draft model costs a block more": Load(
        (KeptLayers(0, CHUNK), KeptLayers(0, CHUNK, drafts="next")),
        24,
        ALL,
        8,
        [(0, slice(1), [10]), (1, slice(1, 2), [10])],
        groups=([10, 11, 12],),
        recompute="block",
    ),
    "and a chunk that is left anyway costs nothing more": Load(
        (KeptLayers(0, CHUNK), KeptLayers(0, CHUNK, drafts="next")),
        25,
        ALL,
        16,
        [(0, slice(2), [10, 11]), (1, slice(1, 3), [10, 11])],
        groups=([10, 11, 12, 13],),
        recompute="block",
    ),
}


@pytest.mark.parametrize("case", LOADS.values(), ids=LOADS.keys())
def test_a_load_takes_what_is_there_and_needed(case):
    request = Request("a", PROMPT[: case.length])
    scene = Scene(*case.layers, recompute=case.recompute)
    scene.has(request, case.there)
    assert scene.load(request, case.at_hand, *case.groups) == (case.loaded, True)
    assert scene.lookups.asked == [case.at_hand // CHUNK], "chunks at hand are not asked for"
    step = scene.step()
    (load,) = step.loads
    assert load.parts == parts_of(scene, request, case.parts)
    whole = len(case.layers) > 1 or case.layers[0].kind != "full"
    assert load.blocks == ([] if whole else load.parts[0].blocks), (
        "else it fails as a whole: a part of it is of no use"
    )
    assert step.nothing_to_compute
    request.num_computed_tokens = case.at_hand + case.loaded
    left = case.length - request.num_computed_tokens
    again = {
        chunk
        for store in scene.step(a=left).stores
        for chunk in store.chunks.names
        if store.chunks.group == 0
    }
    first = (
        case.parts[0][1].stop if case.at_hand < CHUNK else 0
    )  # it is not known whether the pool has what was at hand
    assert again == set(scene.names(request)[first:]), "what was loaded is not stored again"


def test_a_prompt_is_looked_up_once_however_often_vllm_asks_and_anew_if_less_is_at_hand():
    scene, request = Scene(), Request()
    for _ in range(5):
        assert scene.ask(request, 2 * CHUNK) == COMPUTES
    assert scene.lookups.asked == [2]
    scene.has(request)
    assert scene.ask(request, 0) == (3 * CHUNK, True), "vLLM's own cache was reset"
    assert scene.ask(request, 2 * CHUNK) == (CHUNK, True)
    assert scene.lookups.asked == [2, 0]
    assert scene.ask(Request("b", PROMPT[: 2 * CHUNK]), 2 * CHUNK - 1) == COMPUTES, (
        "all but the last is at hand"
    )


def test_what_is_about_to_be_loaded_lies_where_its_lookup_found_it():
    scene, request = Scene(), Request()
    scene.has(request)
    scene.lookups.near = TierChunks(memory=1, disk=3)
    assert scene.side.track(request).by_tier(0) == (0, 0, 0), "not looked up yet"
    external, _ = scene.load(request, CHUNK // 2)
    assert scene.side.track(request).by_tier(external) == (CHUNK, external - CHUNK, 0), (
        "never more than is loaded"
    )


def test_room_for_another_number_of_tokens_than_was_matched_loads_nothing_and_fails():
    scene, request = Scene(), Request()
    scene.has(request)
    scene.load(request, taken=CHUNK)
    (load,) = scene.step().loads
    assert (load.parts, load.blocks) == ([], run(10, 16)), "vLLM computes these"


@pytest.mark.parametrize("layers", [(PLAIN,), (FULL, WINDOW)])
def test_after_a_failed_load_the_prompt_is_computed_and_stored_in_every_group_and_not_loaded_again(layers):
    scene, request = Scene(*layers), Request()
    scene.has(request)
    scene.load(request, 0, run(30, 37), run(10, 17))
    assert scene.step(a=len(PROMPT)).stores == []
    scene.loaded(FAILED)
    assert scene.ask(request) == COMPUTES
    stores = scene.step(a=len(PROMPT)).stores
    assert [store.chunks.group for store in stores] == run(0, len(layers))
    assert stores[0].chunks.names == scene.names(request)


def test_a_lost_server_is_a_miss_and_its_stores_are_not_taken_for_stored():
    scene, request = Scene(), Request()
    scene.lookups.here = False
    assert scene.load(request) == COMPUTES
    assert scene.troubles("lookup", "error_ConnectionError") == 1
    scene.begin(request)
    (store,) = scene.step(a=len(PROMPT)).stores
    scene.stored(store, NOT, NOT, NOT)
    scene.manager.free(request)
    assert scene.ask(request) == COMPUTES
    assert not scene.lookups.noted


def test_where_prompts_part_is_said_each_time_vllm_asks_because_it_forgets_it_and_windows_are_stored_there():
    scene, request = Scene(FULL, WINDOW), Request("a", [*range(5 * CHUNK), 1])
    scene.lookups.leading = 2
    for _ in range(2):
        request.shared_prefix_boundary = 0
        assert scene.ask(request) == COMPUTES
        assert request.shared_prefix_boundary == 2 * CHUNK, "vLLM ends a step there"
    assert scene.lookups.asked == [0]
    scene.begin(request, run(30, 41), run(10, 21))
    windows = [store.chunks for store in scene.step(a=5 * CHUNK).stores if store.chunks.group == 1]
    assert windows == parts_of(scene, request, [(1, slice(1, 2), [32, 33]), (1, slice(4, 5), [38, 39])])


# --- loads that fill the KV cache ---------------------------------------------------------------------------


def scarce(*layers, blocks):
    """A pool of so many blocks besides the null block."""
    scene = Scene(*layers)
    scene.pool.num_gpu_blocks = blocks + 1
    return scene


def offered(scene, name):
    """A request of which the pool holds all. It needs 7 blocks for full attention and 3 for the window."""
    request = Request(name)
    scene.has(request)
    return scene.load(request, 0, *BEYOND_WINDOW, run(50, 53))


@pytest.mark.parametrize(
    "layers, enough", [((FULL, WINDOW), 20), ((FULL, STATE), 20), ((FULL, WINDOW, DRAFTS), 24)]
)
def test_a_load_waits_while_others_hold_blocks_that_it_would_need_to_go_on_until_vllm_can_preempt_them(
    layers, enough
):
    loads = (2 * CHUNK if DRAFTS in layers else 3 * CHUNK, True)
    scene = scarce(*layers, blocks=enough)
    assert offered(scene, "a") == offered(scene, "b") == loads
    scene = scarce(*layers, blocks=enough - 1)
    assert offered(scene, "a") == loads
    scene.step()
    assert offered(scene, "b") == WAITS
    scene.step(a=3)
    assert offered(scene, "b") == loads


def test_a_long_prompt_that_shorter_ones_overtake_is_computed_when_it_has_waited_as_long_as_a_load_may_take():
    scene = scarce(FULL, WINDOW, blocks=19)
    offered(scene, "0")
    for number in range(10):  # there is always one that holds blocks
        scene.clock.now += 0.99
        assert offered(scene, "long") == WAITS
        scene.finish(Request(str(number)))
        offered(scene, str(number + 1))
    scene.clock.now += 1.1
    for _ in range(2):
        assert offered(scene, "long") == COMPUTES
    assert scene.troubles("retrieve", "no_blocks") == 1


@pytest.mark.parametrize("end", ["finished", "failed to load"])
def test_a_request_that_gave_its_blocks_back_keeps_no_load_waiting(end):
    scene = scarce(FULL, WINDOW, blocks=19)
    offered(scene, "a")
    if end == "finished":
        scene.finish(Request("a"))
    else:
        scene.loaded(FAILED)
        assert offered(scene, "a") == COMPUTES
    assert offered(scene, "b") == (3 * CHUNK, True)


def test_a_load_is_not_kept_waiting_for_more_blocks_than_there_are():
    assert offered(scarce(FULL, WINDOW, blocks=5), "a") == (3 * CHUNK, True), (
        "vLLM says what cannot be served"
    )


# --- stores -------------------------------------------------------------------------------------------------


class Store(NamedTuple):
    """A prompt that is computed in one step, and what of it is stored."""

    layers: tuple
    length: int
    parts: list
    """Of each layer group, by its place: which of the prompt's chunks move, and in which blocks."""
    window: list = run(30, 41)
    """Its blocks in vLLM's first group, if that has a window."""
    options: dict = {}  # noqa: RUF012
    speculated: int = 0


SAME = DRAFTS._replace(drafts="same")
WIDE, NARROW = KeptLayers(0, BLOCK, "window", CHUNK + BLOCK), KeptLayers(0, BLOCK, "window", 2)
OF_FULL = (0, slice(3), run(10, 16))
STORES = {
    "every whole chunk": Store((PLAIN,), 27, [OF_FULL]),
    "of a consumer nothing": Store((PLAIN,), 27, [], options={"stores": False}),
    "not what is only speculated on": Store(
        (PLAIN,), 15, [(0, slice(1), [10, 11])], options={"store_generated": True}, speculated=6
    ),
    "windows at the end": Store((FULL, WINDOW), 27, [OF_FULL, (1, slice(2, 3), [34, 35])]),
    "all of windows, if vLLM keeps more": Store(
        (FULL, WINDOW), 27, [OF_FULL, (1, slice(3), run(30, 36))], options={"dense": True}
    ),
    "no window of which vLLM has given back a part": Store(
        (FULL, WIDE), 27, [OF_FULL, (1, slice(2, 3), [34, 35])], [0, 0, 0, 33, 34, 35, 36]
    ),
    "a window of whose chunk one block is needed": Store(
        (FULL, NARROW), 27, [OF_FULL, (1, slice(2, 3), [-1, 35])], [0, 0, 0, 0, 0, 35, 36]
    ),
    "no states, which are not in a request's blocks": Store((FULL, STATE), 27, [OF_FULL]),
    "of a draft model as the next chunk is named": Store(
        (FULL, DRAFTS), 27, [OF_FULL, (1, slice(1, 3), run(10, 14))]
    ),
    "all of a draft model that reads the same": Store(
        (FULL, SAME), 27, [OF_FULL, (1, slice(3), run(10, 16))]
    ),
    "a window where a load will end that leaves a chunk": Store(
        (FULL, WINDOW, DRAFTS), 27, [OF_FULL, (1, slice(1, 3), run(32, 36)), (2, slice(1, 3), run(10, 14))]
    ),
}


@pytest.mark.parametrize("case", STORES.values(), ids=STORES.keys())
def test_a_store_takes_what_a_load_will_need_and_keeps_its_blocks_until_it_has_ended(case):
    scene, request = Scene(*case.layers, **case.options), Request("a", PROMPT[: case.length])
    full = blocks_of(request)
    groups = (full,) if case.layers[0] is PLAIN else (case.window, full, run(50, 54))
    scene.begin(request, *groups)
    stores = scene.step(a=case.length + case.speculated).stores
    assert [store.chunks for store in stores] == parts_of(scene, request, case.parts)
    assert scene.step(a=1).stores == [], "once"
    assert scene.side.stores.under_way is bool(stores)
    scene.manager.free(request)  # it is preempted
    assert scene.pool.used == {block for _, _, blocks in case.parts for block in blocks if block >= 0}
    assert scene.side.stores.frees_blocks is (bool(stores) and SAME not in case.layers), (
        "two stores may read one block"
    )
    for store in stores:
        scene.pool.freed.clear()
        scene.stored(store)
        assert scene.pool.freed == [block for block in reversed(store.chunks.blocks) if block >= 0], (
            "the last first"
        )
    assert (scene.pool.used, scene.side.stores.under_way) == (set(), False)


def test_what_was_stored_before_a_preemption_is_loaded_after_it_and_counts_as_computed():
    scene, request = Scene(), Request()
    assert scene.load(request) == COMPUTES
    scene.begin(request)
    (store,) = scene.step(a=len(PROMPT)).stores
    assert not scene.side.stores.frees_blocks, "the request has them, too"
    scene.stored(store)
    scene.manager.free(request)
    scene.has(request)
    assert scene.load(request) == (3 * CHUNK, True)
    scene.loaded(Loaded(3, "none", TierChunks(pool=3)))
    request.num_computed_tokens = len(PROMPT)
    scene.finish(request)
    (report,) = scene.reports
    assert (report.found, report.loaded, report.pool, report.computed) == (0, 0, 0, len(PROMPT))


def test_an_abort_during_a_store_gives_the_blocks_back_when_all_ranks_have_ended():
    scene, request = Scene(ranks=2), Request()
    scene.begin(request)
    (store,) = scene.step(a=3 * CHUNK).stores
    scene.finish(request)
    scene.manager.free(request)
    scene.stored(store)
    assert scene.pool.used, "the other rank still reads them"
    scene.stored(store, NEW, NOT, StoreOutcome.BEFORE)
    assert not scene.pool.used
    names = scene.names(request)
    assert scene.lookups.noted == {names[0], names[2]}, "what all ranks have stored"
    scene.stored(store)  # told again: nothing happens


def test_a_full_queue_of_stores_drops_the_rest_and_counts_it_until_others_have_ended():
    scene, first, second = Scene(store_queue=2), Request("a"), Request("b")
    scene.begin(first)
    (store,) = scene.step(a=len(PROMPT)).stores
    assert len(store.chunks.names) == 2
    assert scene.troubles("store", "queue_full") == 1
    assert not scene.step(a=0).stores, "what was dropped is not tried again with each step"
    scene.begin(second, run(20, 27))
    assert not scene.step(b=CHUNK).stores
    scene.stored(store)
    second.num_computed_tokens = CHUNK
    assert len(scene.step(b=2 * CHUNK).stores[0].chunks.names) == 2


@pytest.mark.parametrize("store_generated", [False, True])
def test_what_was_generated_is_stored_if_wanted_with_windows_behind_the_prompt_and_drafts_that_it_names(
    store_generated,
):
    scene = Scene(FULL, WINDOW, DRAFTS, store_generated=store_generated)
    request = Request("a", PROMPT[: 2 * CHUNK])
    scene.begin(request, run(30, 37), run(10, 17))
    scene.step(a=2 * CHUNK)
    request.num_computed_tokens, request.all_token_ids = 2 * CHUNK, PROMPT
    stores = [store.chunks for store in scene.step(a=CHUNK + 3).stores]
    of_all = [(0, slice(2, 3), [14, 15]), (1, slice(2, 3), [34, 35]), (2, slice(2, 3), [12, 13])]
    assert stores == (parts_of(scene, request, of_all) if store_generated else [])


def test_states_are_stored_from_where_vllm_says_they_are_if_they_are_those_of_a_chunks_end():
    scene, request = Scene(FULL, WINDOW, STATE), Request()
    scene.begin(request, run(30, 37), run(10, 17), run(50, 54))
    offers = [(2, 61, 2 * CHUNK), (2, 62, 2 * CHUNK + 1), (0, 63, CHUNK), (2, 60, 9 * CHUNK)]
    stores = scene.step({"a": offers, "gone": offers}, a=len(PROMPT)).stores
    states = [store.chunks for store in stores if store.chunks.group == 2]
    assert states == parts_of(scene, request, [(2, slice(1, 2), [61])])
    assert 61 in scene.pool.used
    scene.manager.free(request)
    for store in stores:
        scene.stored(store)
    assert scene.pool.used == set()
    limited = Request("b", PROMPT, {"max_offload_tokens": CHUNK})
    scene.begin(limited, run(30, 37), run(10, 17), run(50, 54))
    stores = scene.step({"b": [(2, 60, CHUNK), (2, 61, 2 * CHUNK)]}, b=len(PROMPT)).stores
    assert [store.chunks.blocks[-1] for store in stores if store.chunks.group == 2] == [60]


def test_what_vllm_computed_without_its_draft_model_is_not_stored_of_it():
    scene = Scene(FULL, DRAFTS, drafted_up_to=4 * CHUNK)
    request, longer = Request("a"), Request("b", run(0, 5 * CHUNK))
    for one in (request, longer):
        scene.begin(one, [], run(10, 20))
    assert {store.chunks.group for store in scene.step(a=2 * CHUNK, b=CHUNK).stores} == {0, 1}
    request.num_computed_tokens, longer.num_computed_tokens = 2 * CHUNK, CHUNK
    stores = scene.step(a=CHUNK + 3, b=4 * CHUNK).stores
    assert {store.chunks.group for store in stores} == {0}, "a request is too long for it"
    after = Request("c")
    scene.load(after, 2 * CHUNK + BLOCK)
    scene.begin(after, [], run(10, 17))
    after.num_computed_tokens = 2 * CHUNK + BLOCK
    assert [store.chunks.group for store in scene.step(c=BLOCK).stores] == [0], (
        "vLLM's own cache may have such blocks"
    )
