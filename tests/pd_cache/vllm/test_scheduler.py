"""The connector's part in the scheduler, by histories of events: no vLLM, no pool, no time."""

from __future__ import annotations

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.reasons import Loaded
from pd_cache.vllm.layers import KeptLayers
from pd_cache.vllm.steps import GroupChunks, StepReport
from tests.pd_cache.vllm.histories import (
    BLOCK,
    CHUNK,
    PER_CHUNK,
    PROMPT,
    Request,
    Scene,
    announced,
    hit,
)

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT


def test_a_hit_is_loaded_with_the_next_step_and_only_the_rest_is_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    assert hit(scene, request, 2) == (2 * CHUNK, True)
    step = scene.step()
    (load,) = step.loads
    assert (load.parts[0].names, load.parts[0].blocks) == (scene.names(request)[:2], [10, 11, 12, 13])
    assert step.nothing_to_compute
    request.num_computed_tokens = 2 * CHUNK
    (store,) = scene.step(a=CHUNK + 3).stores
    assert (store.chunks.names, store.chunks.blocks) == (scene.names(request)[2:], [14, 15])


def test_a_prompt_is_named_and_looked_up_once_however_often_vllm_asks() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    for _ in range(5):
        assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert scene.lookups.asked == [0]


def test_the_last_token_is_left_to_compute() -> None:
    scene, request = Scene(), Request("a", PROMPT[: 2 * CHUNK])
    assert hit(scene, request, 2) == (2 * CHUNK - 1, True)
    (load,) = scene.step().loads
    assert len(load.parts[0].names) == 2, "the chunk is loaded whole"


@pytest.mark.parametrize(
    ("length", "loaded", "blocks"),
    [
        (3 * CHUNK, 3 * CHUNK - BLOCK, [10, 11, 12, 13, 14, -1]),
        (3 * CHUNK + 1, 3 * CHUNK, [10, 11, 12, 13, 14, 15]),
        (2 * CHUNK + BLOCK, 2 * CHUNK, [10, 11, 12, 13]),
    ],
    ids=["a block is left", "a token is left anyway", "the pool has whole chunks only"],
)
@pytest.mark.parametrize("load", ["async", "sync"])
def test_if_wanted_a_full_hit_leaves_what_vllms_own_cache_leaves(
    load: str, length: int, loaded: int, blocks: list[int]
) -> None:
    scene, request = Scene(recompute="block", load=load), Request("a", PROMPT[:length])
    assert hit(scene, request, 3) == (loaded, load == "async")
    (op,) = scene.step().loads
    assert op.parts == [GroupChunks(0, scene.names(request), blocks)], "a block behind the load's end is not touched"
    request.num_computed_tokens = loaded
    assert scene.step(a=length - loaded).stores == [], "the chunk that was loaded in part is in the pool"


def test_what_vllm_holds_and_what_it_would_leave_can_be_in_one_chunk() -> None:
    scene, request = Scene(recompute="block"), Request("a", PROMPT[: 2 * CHUNK])
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 2 * CHUNK - BLOCK) == (0, False)  # type: ignore[arg-type]
    assert scene.side.matched_tokens(request, CHUNK) == (CHUNK - BLOCK, True)  # type: ignore[arg-type]


def test_a_hand_off_is_waited_for_only_up_to_what_vllms_own_cache_leaves() -> None:
    state = KeptLayers(1, CHUNK, "state")
    scene = Scene(recompute="block", layers=[KeptLayers(0, BLOCK), state])
    request = Request("a", PROMPT[: 2 * CHUNK], announced(2 * CHUNK))
    assert scene.side.matched_tokens(request, 0) == (None, False)  # type: ignore[arg-type]
    scene.lookups.there = set(scene.names(request)[:1])
    scene.clock.now += 1
    assert scene.side.matched_tokens(request, 0) == (CHUNK, True)  # type: ignore[arg-type]


def test_blocks_that_vllm_holds_are_left_out_of_a_load() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    external, _ = scene.side.matched_tokens(request, CHUNK + 4)  # type: ignore[arg-type]
    assert external == CHUNK + 4
    assert scene.lookups.asked == [1], "the chunk that is whole is not asked for"
    scene.side.allocated(request, scene.manager.allocate(request, 10), external)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    assert load.parts[0].names == scene.names(request)[1:3]
    assert load.parts[0].blocks == [-1, 13, 14, 15]


def test_room_for_another_number_of_tokens_than_was_matched_loads_nothing_and_fails() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.side.allocated(request, scene.manager.allocate(request, 10), CHUNK)  # type: ignore[arg-type]
    (load,) = scene.step().loads
    assert load.parts == []
    assert load.blocks, "the worker reports these as not loaded, and vLLM computes them"


def test_blocks_of_a_store_outlive_the_preemption_of_their_request() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=3 * CHUNK).stores
    assert scene.side.stores.under_way
    scene.manager.free(request)
    assert scene.manager.block_pool.used == set(range(10, 10 + 3 * PER_CHUNK)), "the store still reads these"
    assert scene.side.stores.frees_blocks
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))
    assert not scene.manager.block_pool.used
    assert not scene.side.stores.under_way


def test_what_was_stored_before_a_preemption_is_matched_after_it() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.matched_tokens(request, 0)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=len(PROMPT)).stores
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))
    scene.manager.free(request)
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    assert scene.lookups.asked == [0], "without another lookup"


def test_after_a_failed_load_the_prompt_is_computed_and_stored_and_not_loaded_again() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    hit(scene, request, 3)
    scene.step()
    scene.side.take_report(StepReport(loads={"a": Loaded(0, "evicted")}))
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    (store,) = scene.step(a=len(PROMPT)).stores
    assert store.chunks.names == scene.names(request)


def test_an_abort_during_a_store_gives_the_blocks_back_when_all_ranks_have_ended() -> None:
    scene, request = Scene(ranks=2), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=3 * CHUNK).stores
    scene.side.finished(request)  # type: ignore[arg-type]
    scene.manager.free(request)
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))
    assert scene.manager.block_pool.used, "the other rank still reads them"
    scene.side.take_report(StepReport({store.job: (1, [NEW, NOT, NEW])}))
    assert not scene.manager.block_pool.used
    assert scene.lookups.noted == {scene.names(request)[at] for at in (0, 2)}, "what all ranks have stored"
    scene.side.take_report(StepReport({store.job: (1, [NEW] * 3)}))  # told again: nothing happens


def test_tokens_that_are_only_speculated_on_are_not_stored() -> None:
    scene, request = Scene(store_generated=True), Request("a", PROMPT[: 2 * CHUNK - 1])
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=2 * CHUNK + 5).stores
    assert len(store.chunks.names) == 1


def test_a_reset_of_vllms_own_cache_has_the_prompt_looked_up_from_its_start() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.there = set(scene.names(request))
    assert scene.side.matched_tokens(request, 2 * CHUNK) == (CHUNK, True)  # type: ignore[arg-type]
    assert scene.side.matched_tokens(request, 0) == (3 * CHUNK, True)  # type: ignore[arg-type]
    assert scene.lookups.asked == [2, 0], "whether the pool has the first chunks had never been asked"


def test_a_lost_server_is_a_miss_and_its_stores_are_not_taken_for_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.here = False
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]
    assert scene.metrics.totals()["troubles", "lookup", "error_ConnectionError"] == 1
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=len(PROMPT)).stores
    scene.side.take_report(StepReport({store.job: (1, [NOT] * 3)}))
    scene.manager.free(request)
    assert scene.side.matched_tokens(request, 0) == (0, False)  # type: ignore[arg-type]


def test_a_full_queue_of_stores_drops_the_rest_and_counts_it() -> None:
    scene, request = Scene(store_queue=2), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    (store,) = scene.step(a=len(PROMPT)).stores
    assert len(store.chunks.names) == 2
    assert scene.metrics.totals()["troubles", "store", "queue_full"] == 1
    assert not scene.step(a=0).stores, "what was dropped is not tried again with each step"


def test_a_consumer_stores_nothing() -> None:
    scene, request = Scene(stores=False), Request("a", PROMPT)
    scene.side.track(request)  # type: ignore[arg-type]
    scene.manager.allocate(request, 10)
    assert not scene.step(a=len(PROMPT)).stores
