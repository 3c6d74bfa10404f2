"""The connector's part in the scheduler, by histories of events: epochs of the weights."""

from __future__ import annotations

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.vllm.steps import StepReport
from tests.pd_cache.vllm.histories import (
    CHUNK,
    PROMPT,
    Request,
    Scene,
    hit,
)

NEW, NOT = StoreOutcome.NEW, StoreOutcome.NOT


def running(scene: Scene, request: Request, *, at_hand: int = 0, block: int = 10) -> None:
    """A request that has computed its first chunk, or has it at hand."""
    assert scene.side.matched_tokens(request, at_hand) == (0, False)  # type: ignore[arg-type]
    scene.manager.allocate(request, block)
    request.num_computed_tokens = CHUNK


def test_after_a_reset_what_was_computed_before_is_neither_stored_nor_kept_by_vllm() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", [7] * len(PROMPT))
    running(scene, old)
    assert scene.side.reset()
    assert scene.manager.block_pool.evicted == set(range(64))
    scene.manager.block_pool.evicted.clear()
    assert scene.step(old=len(PROMPT) - CHUNK).stores == []
    assert scene.manager.block_pool.evicted == set(range(10, 17)), "what vLLM's own cache would keep of it"
    running(scene, new, block=20)
    (store,) = scene.step(new=CHUNK).stores
    assert store.epoch == scene.lookups.epoch == "run-1"
    scene.manager.block_pool.evicted.clear()
    scene.side.finished(old)  # type: ignore[arg-type]
    assert scene.manager.block_pool.evicted == set(range(10, 17))
    scene.manager.block_pool.evicted.clear()
    scene.step(new=CHUNK)
    assert not scene.manager.block_pool.evicted


def test_a_reset_on_another_node_is_known_with_the_next_lookup() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", [7] * len(PROMPT))
    running(scene, old)
    scene.lookups.reset()
    assert len(scene.step(old=CHUNK).stores) == 1, "in the epoch in which it was computed"
    running(scene, new, block=20)
    (store,) = scene.step(old=1, new=CHUNK).stores
    assert (store.epoch, store.chunks.names) == ("run-1", scene.names(new)[:2])


def test_what_may_be_at_hand_from_before_a_reset_is_not_stored() -> None:
    scene, old, late = Scene(), Request("old", PROMPT), Request("late", PROMPT)
    running(scene, old)
    scene.side.reset()
    running(scene, late, at_hand=CHUNK, block=20)
    assert scene.step(old=1, late=CHUNK).stores == []
    clean = Request("clean", PROMPT)
    for request in (old, late):
        scene.side.finished(request)  # type: ignore[arg-type]
    running(scene, clean, at_hand=CHUNK, block=30)
    assert len(scene.step(clean=CHUNK).stores) == 1, "nobody is left who could have put old KV into vLLM's own cache"


def test_a_request_that_learns_of_a_reset_with_tokens_at_hand_is_not_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.lookups.reset()
    running(scene, request, at_hand=CHUNK)
    assert scene.step(a=CHUNK).stores == []


def test_a_request_that_was_preempted_for_a_reset_is_computed_anew_and_stored() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    scene.manager.free(request)
    request.num_computed_tokens = 0
    running(scene, request, block=20)
    (store,) = scene.step(a=CHUNK).stores
    assert (store.epoch, len(store.chunks.names)) == ("run-1", 2)


def test_a_reset_that_the_pool_does_not_take_is_tried_again_and_until_then_nothing_is_loaded_or_stored() -> None:
    scene, request, later = Scene(), Request("a", PROMPT), Request("b", PROMPT)
    scene.lookups.there = set(scene.names(request))
    scene.lookups.resets = False
    assert not scene.side.reset()
    running(scene, request)
    assert scene.step(a=CHUNK).stores == []
    scene.lookups.resets = True
    assert scene.side.matched_tokens(later, 0) == (0, False), "a second has not passed"  # type: ignore[arg-type]
    scene.clock.now += 1
    assert scene.side.matched_tokens(later, 0) == (0, False)  # type: ignore[arg-type]
    assert scene.lookups.begun == 1
    assert scene.step(a=CHUNK).stores == [], "it was computed before"


def test_a_lookup_without_an_answer_says_nothing_of_epochs() -> None:
    scene, old, new = Scene(), Request("old", PROMPT), Request("new", PROMPT)
    scene.side.reset()
    scene.manager.block_pool.evicted.clear()
    running(scene, old)
    scene.lookups.epoch = None
    running(scene, new, block=20)
    stores = scene.step(old=CHUNK, new=CHUNK).stores
    assert {store.epoch for store in stores} == {"run-1"}
    assert not scene.manager.block_pool.evicted


def test_chunks_of_an_earlier_epoch_are_not_announced() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    request.num_computed_tokens = 0
    (store,) = scene.step(a=CHUNK).stores
    scene.side.reset()
    scene.side.take_report(StepReport(jobs={store.job: (1, [NEW])}))
    assert list(scene.side.stores.take_events()) == []


def test_of_an_outdated_request_only_what_is_new_is_taken_out_of_vllms_cache_and_all_of_it_when_it_is_preempted() -> (
    None
):
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    evicted = scene.manager.block_pool.evicted
    seen = []
    for _ in range(5):
        evicted.clear()
        scene.step(a=1)
        seen.append(set(evicted))
    assert seen[:3] == [set(range(10, 17))] * 3
    assert seen[3:] == [{16}] * 2
    scene.manager.free(request)
    evicted.clear()
    scene.step()
    assert evicted == {16}


def test_a_request_that_resumes_with_what_was_its_own_before_a_reset_stays_outdated() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    running(scene, request)
    scene.side.reset()
    scene.manager.free(request)
    running(scene, request, at_hand=CHUNK, block=20)
    assert scene.step(a=CHUNK).stores == []


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_not_stored_because_of_a_reset_is_not_announced(taken: bool) -> None:
    scene, request = Scene(), Request("a", PROMPT, kv_transfer_params={"do_remote_decode": True})
    running(scene, request)
    scene.lookups.resets = taken
    scene.side.reset()
    request.num_computed_tokens = len(PROMPT)
    answer = scene.side.finished(request)  # type: ignore[arg-type]
    assert answer is not None
    assert answer["pd_cache"]["prefix_tokens"] == 0


def test_a_load_bears_the_epoch_in_which_its_chunks_were_found() -> None:
    scene, request = Scene(), Request("a", PROMPT)
    scene.side.reset()
    hit(scene, request, 2)
    (load,) = scene.step().loads
    assert load.epoch == "run-1"
