"""The connector's part in the scheduler, by histories of events: models whose layers do not all keep every token, and draft models."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.reasons import Loaded
from pd_cache.vllm.layers import KeptLayers
from pd_cache.vllm.steps import GroupChunks, StepReport
from tests.pd_cache.vllm.histories import (
    BLOCK,
    CHUNK,
    FULL,
    PROMPT,
    STATE,
    WINDOW,
    Request,
    Scene,
    hit,
    in_groups,
)

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT


def test_of_a_window_the_end_is_loaded_without_the_blocks_that_vllm_has_not_allocated() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [0, 0, 0, 0, 0, 35, 36], [10, 11, 12, 13, 14, 15, 16])
    scene.side.allocated(request, blocks, 3 * CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    assert load.parts == [
        GroupChunks(0, scene.names(request), [10, 11, 12, 13, 14, 15]),
        GroupChunks(1, scene.names(request)[2:], [-1, 35]),
    ]
    assert load.blocks == [], "with several groups a load fails as a whole"


@pytest.mark.parametrize("layers", [KeptLayers(0, BLOCK, "window", 2 * BLOCK), KeptLayers(0, CHUNK, "state")])
def test_a_load_of_windows_or_states_only_fails_as_a_whole_because_a_part_of_one_is_of_no_use(
    layers: KeptLayers,
) -> None:
    scene, request = Scene(layers=[layers]), Request("a", PROMPT)
    hit(scene, request, 3)
    (load,) = scene.step().loads
    assert [len(part.names) for part in load.parts] == [1]
    assert load.blocks == []


def test_a_window_is_restored_at_a_chunks_end_also_if_vllms_own_cache_leaves_less() -> None:
    scene, request = Scene(layers=[FULL, WINDOW], recompute="block"), Request("a", PROMPT[: 3 * CHUNK])
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (2 * CHUNK, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [0, 0, 32, 33], [10, 11, 12, 13])
    scene.side.allocated(request, blocks, 2 * CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    names = scene.names(request)
    assert load.parts == [GroupChunks(0, names[:2], [10, 11, 12, 13]), GroupChunks(1, names[1:2], [32, 33])]


def test_of_states_the_last_is_loaded_and_a_token_is_left_to_compute() -> None:
    scene, request = (
        Scene(layers=[KeptLayers(0, BLOCK), KeptLayers(1, CHUNK, "state")]),
        Request("a", PROMPT[: 2 * CHUNK]),
    )
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 0) == (CHUNK, True)  # type: ignore[arg-type]
    scene.side.allocated(request, in_groups(scene, request, [10, 11], [20]), CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    names = scene.names(request)[:1]
    assert load.parts == [GroupChunks(0, names, [10, 11]), GroupChunks(1, names, [20])]


def scarce(blocks: int) -> Scene:
    """Two layers, of which one has a window, and a pool of so many blocks besides the null block."""
    scene = Scene(layers=[FULL, WINDOW])
    scene.manager.block_pool.num_gpu_blocks = blocks + 1
    return scene


def offered(scene: Scene, request: Request) -> Any:
    """A request of which the pool holds all. It needs 7 blocks for full attention and 3 for the window."""
    scene.lookups.there |= set(scene.names(request))
    external, later = scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    if external:
        blocks = in_groups(scene, request, [0, 0, 0, 0, 34, 35, 36], [10, 11, 12, 13, 14, 15, 16])
        scene.side.allocated(request, blocks, external)  # type: ignore[arg-type]
    return external, later


def test_a_load_waits_while_others_hold_blocks_that_it_would_need_to_go_on_until_vllm_can_preempt_them() -> None:
    scene, first, second = scarce(19), Request("a", PROMPT), Request("b", PROMPT)
    assert offered(scene, first) == (3 * CHUNK, True)
    scene.step()
    assert offered(scene, second) == (None, False)
    scene.step(a=3)
    assert offered(scene, second) == (3 * CHUNK, True)


def test_loads_for_which_there_are_blocks_wait_for_nothing() -> None:
    scene = scarce(20)
    assert offered(scene, Request("a", PROMPT)) == offered(scene, Request("b", PROMPT)) == (3 * CHUNK, True)


def test_a_long_prompt_that_shorter_ones_overtake_is_computed_when_it_has_waited_as_long_as_a_load_may_take() -> None:
    scene, long = scarce(19), Request("long", PROMPT)
    offered(scene, Request("0", PROMPT))
    for number in range(10):  # there is always one that holds blocks
        scene.clock.now += 0.99
        assert offered(scene, long) == (None, False)
        scene.side.finished(Request(str(number), PROMPT))  # type: ignore[arg-type]
        offered(scene, Request(str(number + 1), PROMPT))
    scene.clock.now += 1.1
    assert offered(scene, long) == (0, False)


@pytest.mark.parametrize("end", ["finished", "failed to load"])
def test_a_request_that_gave_its_blocks_back_keeps_no_load_waiting(end: str) -> None:
    scene, first, second = scarce(19), Request("a", PROMPT), Request("b", PROMPT)
    offered(scene, first)
    if end == "finished":
        scene.side.finished(first)  # type: ignore[arg-type]
    else:
        scene.side.take_report(StepReport(loads={"a": Loaded(0, "evicted")}))
        assert offered(scene, first) == (0, False)
    assert offered(scene, second) == (3 * CHUNK, True)


def test_a_load_is_not_kept_waiting_for_more_blocks_than_there_are() -> None:
    assert offered(scarce(5), Request("a", PROMPT)) == (3 * CHUNK, True), "vLLM says what cannot be served"


def test_what_vllm_holds_is_not_loaded_in_any_group() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    computed = 2 * CHUNK + BLOCK
    assert scene.side.matched_tokens(request, computed) == (3 * CHUNK - computed, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [0, 0, 0, 0, 34, 35, 36], [10, 11, 12, 13, 14, 15, 16])
    scene.side.allocated(request, blocks, 3 * CHUNK - computed)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    name = scene.names(request)[2:3]
    assert load.parts == [GroupChunks(0, name, [-1, 15]), GroupChunks(1, name, [-1, 35])]


def test_windows_are_stored_at_the_end_of_the_prompt_and_behind_it() -> None:
    scene, request = Scene(layers=[FULL, WINDOW], store_generated=True), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 37)), list(range(10, 17)))
    stores = scene.step(a=len(PROMPT)).stores
    names = scene.names(request)
    assert [store.chunks for store in stores] == [
        GroupChunks(0, names, list(range(10, 16))),
        GroupChunks(1, names[2:], [34, 35]),
    ]
    request.num_computed_tokens = len(PROMPT)
    request.all_token_ids = list(range(4 * CHUNK))
    in_groups(scene, request, [0, 0, 0, 0, 0, 0, 36, 37], list(range(10, 18)))
    stores = scene.step(a=4 * CHUNK - len(PROMPT)).stores
    assert [store.chunks.blocks for store in stores] == [[16, 17], [36, 37]]


def test_a_window_is_stored_where_prompts_part() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", [*range(5 * CHUNK), 1])
    scene.lookups.leading = 2
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert request.shared_prefix_boundary == 2 * CHUNK, "vLLM ends a step there"
    in_groups(scene, request, list(range(30, 41)), list(range(10, 21)))
    windows = [store.chunks for store in scene.step(a=5 * CHUNK).stores if store.chunks.group == 1]
    names = scene.names(request)
    assert windows == [GroupChunks(1, names[1:2], [32, 33]), GroupChunks(1, names[4:], [38, 39])]


def test_where_prompts_part_is_said_each_time_vllm_asks_because_it_forgets_it() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", [*range(5 * CHUNK), 1])
    scene.lookups.leading = 2
    for _ in range(2):
        request.shared_prefix_boundary = 0
        scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
        assert request.shared_prefix_boundary == 2 * CHUNK
    assert scene.lookups.asked == [0]


@pytest.mark.parametrize(("dense", "stored"), [(True, [0, 1, 2, 3, 4]), (False, [4])])
def test_windows_are_kept_as_densely_as_vllm_keeps_them(dense: bool, stored: list[int]) -> None:
    scene, request = Scene(layers=[FULL, WINDOW], dense=dense), Request("a", [*range(5 * CHUNK), 1])
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 41)), list(range(10, 21)))
    windows = [store.chunks for store in scene.step(a=5 * CHUNK).stores if store.chunks.group == 1]
    assert [name for run in windows for name in run.names] == [scene.names(request)[number] for number in stored]


def test_a_window_of_which_vllm_has_given_back_what_a_load_would_need_is_not_stored() -> None:
    wide = KeptLayers(0, BLOCK, "window", CHUNK + BLOCK)
    scene, request = Scene(layers=[FULL, wide]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [0, 0, 0, 33, 34, 35, 36], list(range(10, 17)))
    windows = [store.chunks for store in scene.step(a=len(PROMPT)).stores if store.chunks.group == 1]
    assert windows == [GroupChunks(1, scene.names(request)[2:], [34, 35])]
    narrow = Scene(layers=[FULL, KeptLayers(0, BLOCK, "window", 2)])
    narrow.side.track(request)  # type: ignore[arg-type]
    in_groups(narrow, request, [0, 0, 0, 0, 0, 35, 36], list(range(10, 17)))
    windows = [store.chunks for store in narrow.step(a=len(PROMPT)).stores if store.chunks.group == 1]
    assert windows == [GroupChunks(1, scene.names(request)[2:], [-1, 35])], "the window of its end needs one block"
    assert 0 not in narrow.manager.block_pool.used


def test_states_are_stored_from_where_vllm_says_they_are_if_they_are_those_of_a_chunks_end() -> None:
    scene, request = Scene(layers=[FULL, WINDOW, STATE]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 37)), list(range(10, 17)), [50, 51, 52, 53])
    offers = [(2, 61, 2 * CHUNK), (2, 62, 2 * CHUNK + 1), (0, 63, CHUNK), (2, 60, 9 * CHUNK)]
    stores = scene.step({"a": offers, "gone": offers}, a=len(PROMPT)).stores
    states = [store for store in stores if store.chunks.group == 2]
    assert [store.chunks for store in states] == [GroupChunks(2, scene.names(request)[1:2], [61])]
    assert 61 in scene.manager.block_pool.used
    scene.side.take_report(StepReport({store.job: (1, [NEW] * len(store.chunks.names)) for store in stores}))
    assert scene.manager.block_pool.used == set()


DRAFTS = KeptLayers(1, BLOCK, drafts="next")
"""Layers of a draft model, in the blocks of the model that it drafts for."""


def test_of_a_draft_model_a_chunk_is_stored_when_and_as_the_next_one_is_named() -> None:
    scene, request = Scene(layers=[FULL, DRAFTS]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [], list(range(10, 17)))
    names = scene.names(request)
    assert [store.chunks for store in scene.step(a=CHUNK).stores] == [GroupChunks(0, names[:1], [10, 11])]
    request.num_computed_tokens = CHUNK
    assert [store.chunks for store in scene.step(a=2 * CHUNK + 3).stores] == [
        GroupChunks(0, names[1:], [12, 13, 14, 15]),
        GroupChunks(1, names[1:], [10, 11, 12, 13]),
    ]


def test_of_a_draft_model_a_load_takes_each_chunk_by_the_name_of_the_next_and_leaves_the_last() -> None:
    scene, request = Scene(layers=[FULL, DRAFTS]), Request("a", PROMPT[: 3 * CHUNK])
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, BLOCK) == (2 * CHUNK - BLOCK, True)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, [], list(range(10, 16)))
    scene.side.allocated(request, blocks, 2 * CHUNK - BLOCK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    names = scene.names(request)
    assert load.parts == [GroupChunks(0, names[:2], [-1, 11, 12, 13]), GroupChunks(1, names[1:3], [-1, 11, 12, 13])]
    request.num_computed_tokens = 2 * CHUNK
    assert [store.chunks for store in scene.step(a=CHUNK).stores] == [GroupChunks(0, names[2:], [14, 15])], (
        "what was loaded is not stored again"
    )


def test_a_draft_model_costs_the_block_that_it_costs_in_vllms_own_cache() -> None:
    drafts = KeptLayers(0, CHUNK, drafts="next")
    scene = Scene(layers=[KeptLayers(0, CHUNK), drafts], recompute="block")
    for length, loaded in ((3 * CHUNK, CHUNK), (3 * CHUNK + 1, 2 * CHUNK)):
        request = Request(f"{length}", PROMPT[:length])
        scene.lookups.there = set(scene.names(request))
        assert scene.side.matched_tokens(request, 0) == (loaded, True), length  # type: ignore[arg-type]


@pytest.mark.parametrize("store_generated", [False, True])
def test_what_names_a_draft_models_last_chunk_of_a_prompt_is_stored_with_what_was_generated(
    store_generated: bool,
) -> None:
    scene = Scene(layers=[FULL, DRAFTS], store_generated=store_generated)
    request = Request("a", PROMPT[: 2 * CHUNK])
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [], list(range(10, 17)))
    scene.step(a=2 * CHUNK)
    request.num_computed_tokens = 2 * CHUNK
    request.all_token_ids = PROMPT
    stores = [store.chunks for store in scene.step(a=CHUNK + 3).stores]
    names = scene.names(request)[2:]
    expected = [GroupChunks(0, names, [14, 15]), GroupChunks(1, names, [12, 13])]
    assert stores == (expected if store_generated else [])


def test_a_window_is_stored_where_a_load_will_end_that_leaves_a_chunk() -> None:
    narrow = KeptLayers(0, BLOCK, "window", BLOCK + 2)
    scene, request = Scene(layers=[FULL, narrow, DRAFTS]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, list(range(30, 37)), list(range(10, 17)))
    windows = [store.chunks for store in scene.step(a=len(PROMPT)).stores if store.chunks.group == 1]
    assert windows == [GroupChunks(1, scene.names(request)[1:], [32, 33, 34, 35])]


def test_a_draft_model_that_reads_what_the_other_reads_loads_and_stores_what_the_other_does() -> None:
    scene, request = Scene(layers=[FULL, DRAFTS._replace(drafts="same")]), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    in_groups(scene, request, [], list(range(10, 17)))
    names, blocks = scene.names(request), list(range(10, 16))
    stores = [store.chunks for store in scene.step(a=len(PROMPT)).stores]
    assert stores == [GroupChunks(0, names, blocks), GroupChunks(1, names, blocks)]


def test_what_vllm_computed_without_its_draft_model_is_not_stored_of_it() -> None:
    scene = Scene(layers=[FULL, DRAFTS], drafted_up_to=4 * CHUNK)
    request, longer = Request("a", PROMPT), Request("b", list(range(5 * CHUNK)))
    for one in (request, longer):
        scene.side.track(one)  # type: ignore[arg-type]
        in_groups(scene, one, [], list(range(10, 20)))
    scene.step(a=2 * CHUNK, b=CHUNK)
    request.num_computed_tokens, longer.num_computed_tokens = 2 * CHUNK, CHUNK
    stores = scene.step(a=CHUNK + 3, b=4 * CHUNK).stores
    assert {store.chunks.group for store in stores} == {0}
    after = Request("c", PROMPT)
    scene.side.matched_tokens(after, 2 * CHUNK + BLOCK)  # type: ignore[arg-type]
    in_groups(scene, after, [], list(range(10, 17)))
    after.num_computed_tokens = 2 * CHUNK + BLOCK
    assert [store.chunks.group for store in scene.step(c=BLOCK).stores] == [0], "vLLM's own cache may have such blocks"


def test_an_announced_prefix_leaves_the_chunk_that_a_load_leaves() -> None:
    scene = Scene(layers=[FULL, DRAFTS])
    request = Request("a", PROMPT, {"do_remote_decode": True}, num_computed_tokens=len(PROMPT))
    scene.side.track(request)  # type: ignore[arg-type]
    answer = scene.side.finished(request)  # type: ignore[arg-type]
    assert answer is not None
    assert answer["pd_cache"]["prefix_tokens"] == 2 * CHUNK
    other = Scene(layers=[FULL, DRAFTS])
    waiting = Request("b", PROMPT, answer)
    assert other.side.matched_tokens(waiting, 0) == (None, False)  # type: ignore[arg-type]
    other.lookups.there = set(other.names(waiting))
    other.clock.now += 0.1
    assert other.side.matched_tokens(waiting, 0) == (2 * CHUNK, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("further", [[], ["0123456789abcdef"]])
def test_a_prefix_without_the_kv_of_the_own_draft_model_is_not_waited_for(further: list[str]) -> None:
    announced = {"prefix_tokens": 2 * CHUNK, "namespace": Scene().lookups._database.namespace.fingerprint()}
    params = {"do_remote_prefill": True, "pd_cache": {**announced, "further": further}}
    scene = Scene(layers=[FULL, DRAFTS])
    assert scene.side.matched_tokens(Request("a", PROMPT, params), 0) == (0, False)  # type: ignore[arg-type]
    assert scene.metrics.totals()["troubles", "lookup", "other_namespace"] == 1
    without = Scene().side.matched_tokens(Request("a", PROMPT, params), 0)  # type: ignore[arg-type]
    assert without == (None, False), "a node without a draft model waits"


def test_after_a_failed_load_every_group_is_stored_again() -> None:
    scene, request = Scene(layers=[FULL, WINDOW]), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    blocks = in_groups(scene, request, list(range(30, 37)), list(range(10, 17)))
    scene.side.allocated(request, blocks, 3 * CHUNK)  # type: ignore[arg-type]
    scene.step()
    assert scene.step(a=len(PROMPT)).stores == []
    scene.side.take_report(StepReport(loads={"a": Loaded(0, "evicted")}))
    assert {store.chunks.group for store in scene.step(a=len(PROMPT)).stores} == {0, 1}
